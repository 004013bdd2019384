"""`python -m redraft.recipes.cli` is `redraft`."""

from redraft.recipes.cli import main

main()
