"""The config of a recipe from command-line arguments, without running it."""

from collections.abc import Mapping, Sequence
from typing import Any

from redraft.recipes.cli.run import Recipe, parse_recipe


def parse(
    config_type: type,
    description: str | None,
    presets: Mapping[str, Any],
    args: Sequence[str],
    *,
    prog: str,
) -> Any:
    """A `config_type` from command-line arguments. Raises: as `parse_recipe`."""
    recipe = Recipe(
        main=print, config_type=config_type, description=description, presets=presets, prog=prog
    )
    return parse_recipe(recipe, args)
