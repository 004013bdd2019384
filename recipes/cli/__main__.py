"""`python -m redraft.recipes.cli` is `redraft`."""

from redraft.recipes.cli.run import main

main()
