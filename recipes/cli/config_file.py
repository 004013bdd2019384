"""A command's config as a TOML file: `--config FILE` reads one, `--print-config` writes one.

    redraft train eagle3 --config eagle3.toml --optim.lr 3e-4

Keys are those of the flags: `--optim.lr` is `lr` in the table `[optim]`. What the file leaves out keeps its default.
TOML has no null: the text "None" stands for it, as on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

Config = TypeVar("Config")

NONE = "None"


def read_config(path: Path, default: Config) -> Config:
    """`default`, changed by the TOML file at `path`. Raises FileNotFoundError; ValueError: it is
    not TOML, a key is unknown, or a value does not fit."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no config file {path}: --print-config prints one to begin with")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML ({error}); strings need quotes") from error
    config: Config = _change(default, values, str(path), "")
    return config


def _change(default: Any, values: Mapping[str, Any], path: str, prefix: str) -> Any:
    hints = get_type_hints(type(default))
    known = [field.name for field in dataclasses.fields(default) if field.init]
    changes = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"{path}: there is no setting {prefix}{key}; {hint}")
        before = getattr(default, name)
        if dataclasses.is_dataclass(before):
            if not isinstance(value, Mapping):
                raise ValueError(f"{path}: {prefix}{key} is a table: write [{prefix}{key}]")
            changes[name] = _change(before, value, path, f"{prefix}{key}.")
        else:
            changes[name] = _convert(value, hints[name], f"{path}: {prefix}{key}")
    try:
        return dataclasses.replace(default, **changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _convert(value: Any, hint: Any, where: str) -> Any:
    if value == NONE and _takes_none(hint):
        return None

    # msgspec knows no Path, and asks this hook.
    def read_path(kind: type, found: Any) -> Any:
        if kind is Path and isinstance(found, str):
            return Path(found)
        raise ValueError(f"expected a path in quotes, got {found!r}")

    try:
        return msgspec.convert(value, hint, dec_hook=read_path)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {error}") from error


def _takes_none(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def render_config(config: Any) -> str:
    return "\n".join(_render(config, "")) + "\n"


def _render(config: Any, prefix: str) -> Iterator[str]:
    """The lines of a table. TOML wants keys before sub-tables."""
    tables = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            tables.append((field.name, value))
        else:
            yield f"{field.name} = {_render_value(value)}"
    for name, value in tables:
        yield f"\n[{prefix}{name}]"
        yield from _render(value, f"{prefix}{name}.")


def _render_value(value: Any) -> str:
    if value is None:
        return json.dumps(NONE)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_render_value, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
