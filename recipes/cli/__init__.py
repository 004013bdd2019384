"""The `redraft` command. Quick to start: nothing here loads torch or vLLM."""

from redraft.recipes.cli.commands import COMMANDS, Command, Group
from redraft.recipes.cli.run import (
    Recipe,
    describe_error,
    describe_unknown,
    dispatch,
    format_help,
    main,
    parse,
    parse_recipe,
    run_choice,
    run_guarded,
    run_recipe,
)

__all__ = [
    "COMMANDS",
    "Command",
    "Group",
    "Recipe",
    "describe_error",
    "describe_unknown",
    "dispatch",
    "format_help",
    "main",
    "parse",
    "parse_recipe",
    "run_choice",
    "run_guarded",
    "run_recipe",
]
