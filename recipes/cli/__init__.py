"""The `redraft` command. Quick to start: nothing here loads torch or vLLM."""

from redraft.recipes.cli.run import main as main
