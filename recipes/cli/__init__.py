"""The `redraft` command. It starts quickly, because nothing here imports torch or vLLM."""

from redraft.recipes.cli.run import main as main
