"""The `redraft` command. Quick to start: nothing here loads torch or vLLM."""

from redraft.recipes.cli.commands import COMMANDS, Command, Group
from redraft.recipes.cli.run import (
    describe_error,
    describe_unknown,
    dispatch,
    format_help,
    main,
    parse,
    run_guarded,
    run_recipe,
)

__all__ = [
    "COMMANDS",
    "Command",
    "Group",
    "describe_error",
    "describe_unknown",
    "dispatch",
    "format_help",
    "main",
    "parse",
    "run_guarded",
    "run_recipe",
]
