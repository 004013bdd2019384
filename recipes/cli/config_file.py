"""A command's config as a TOML file: `--config FILE` reads one, `--print-config` writes one.

    redraft train eagle3 --config eagle3.toml --optim.lr 3e-4

Keys have the names of the flags: `--optim.lr` is `lr` in the table `[optim]`. Keys that the file
omits keep their defaults. TOML has no null, so the text "None" stands for it, as on the command
line.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from redraft.files.setting_error import SettingError
from redraft.files.settings import NONE, convert, describe_unknown, read_table, render_value

Config = TypeVar("Config")


def read_config(path: Path, default: Config) -> Config:
    """Return `default` with the changes from the TOML file at `path`.

    Raises:
        FileNotFoundError
        ValueError: the file is not TOML, a key is unknown, or a value has the wrong type.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no config file {path}: create one with --print-config")
    config: Config = _change(default, read_table(path), str(path), "")
    return config


def _change(default: Any, values: Mapping[str, Any], path: str, prefix: str) -> Any:
    hints = get_type_hints(type(default))
    known = [field.name for field in dataclasses.fields(default) if field.init]
    changes = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(f"{path}: {describe_unknown(name, known, prefix)}")
        before = getattr(default, name)
        if dataclasses.is_dataclass(before):
            if not isinstance(value, Mapping):
                raise ValueError(f"{path}: {prefix}{key} must be a table: write [{prefix}{key}]")
            changes[name] = _change(before, value, path, f"{prefix}{key}.")
        else:
            is_none = value == NONE and type(None) in get_args(hints[name])
            changes[name] = (
                None if is_none else convert(value, hints[name], f"{path}: {prefix}{key}", Path)
            )
    changed = copy.copy(default)
    vars(changed).update(changes)
    try:  # The whole config is checked with the flags, which may supply what the file omits.
        return dataclasses.replace(changed) if prefix else changed
    except SettingError as error:
        raise ValueError(f"{path}: {error.spell(lambda name: prefix + name)}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def render_config(config: Any) -> str:
    return "\n".join(_render(config, "")) + "\n"


def _render(config: Any, prefix: str) -> Iterator[str]:
    """Return the lines of a table. TOML requires keys before sub-tables."""
    tables = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((field.name, value))
        else:
            yield f"{field.name} = {render_value(value)}"
    for name, value in tables:
        yield f"\n[{prefix}{name}]"
        yield from _render(value, f"{prefix}{name}.")
