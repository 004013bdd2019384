"""Settings in a TOML file.

They are read into frozen dataclasses. A printed example explains every key.

    @dataclass                          [fleet]
    class FleetConfig:          ◄─►     # Seconds between two polls of every server.
        poll_s: float = 10              poll_s = 10
        (a string under the field)

The string under a field documents it. A field's metadata may contain `example`, a value to print
instead of the default, and `listed: False`, which omits the field from the printed example.
"""

import ast
import difflib
import functools
import inspect
import itertools
import json
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import tyro

from redraft.files.setting_error import SettingError

Config = TypeVar("Config")

COMMENT_COLUMNS = 100
NONE = "None"


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The flags of a command whose settings are in a TOML file."""

    config: Path
    """The TOML file with the settings."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Override one setting of the file, written as a line of TOML: KEY=VALUE. Repeat the flag for
    more settings.
    """
    print_config: bool = False
    """Print a complete TOML file, with the default and meaning of every setting, and exit. Values
    of --set replace the defaults; --config is not read.
    """


def read_toml(path: Path, config_type: type[Config], overrides: Sequence[str] = ()) -> Config:
    """Read the configuration in `path`.

    An override is a line of TOML, e.g. `training.lr=1e-3`, and takes precedence. Relative
    paths are relative to the file's folder.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a key is unknown (the message names the closest known one), or a value does not
            fit.
    """
    if not path.exists():
        command = config_type.__name__.removesuffix("Config").lower()
        raise FileNotFoundError(
            f"there is no {path}: create it with redraft {command} --print-config > {path}"
        )
    values = read_table(path)
    require_known(values, config_type, f"{path}: ")
    values = merge(values, _read_overrides(overrides, config_type))
    folder = path.parent.absolute()
    config: Config = convert(
        values,
        config_type,
        f"{path} with --set" if overrides else str(path),
        lambda text: folder / Path(text).expanduser(),
    )
    return config


def render_example(config_type: type, overrides: Sequence[str] = ()) -> str:
    """Return a complete file with the default and meaning of every setting.

    Values in `overrides`, which are lines of TOML, replace the defaults.

    Raises:
        ValueError: an override has an unknown key, or a value of the wrong type.
    """
    values = _read_overrides(overrides, config_type)
    return "\n".join(_render_section(config_type, "", values))


def _read_overrides(overrides: Sequence[str], config_type: type) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        table = _parse(override, f"--set {override}")
        require_known(table, config_type, f"--set {override}: ")
        values = merge(values, table)
    return values


def _render_section(config_type: type, prefix: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one table. TOML requires a table's keys to precede its sub-tables."""
    documents, types = read_field_docs(config_type), get_type_hints(config_type)
    sections = [f.name for f in fields(config_type) if is_dataclass(types[f.name])]
    for config_field in fields(config_type):
        key = config_field.name
        if key in sections or not config_field.metadata.get("listed", True):
            continue
        # Do not break at hyphens, because --capture.spool must stay in one piece.
        text = documents.get(key, "")
        if choices := list_choices(types[key]):
            text += f" One of {', '.join(map(render_value, choices))}."
        for line in textwrap.wrap(text, COMMENT_COLUMNS, break_on_hyphens=False):
            yield f"# {line}"
        if key in values:
            value = convert(values[key], types[key], f"--set {prefix}{key}", Path)
        else:
            value = _example_value(config_field)
        # TOML has no null, so a setting that is None by default becomes a comment.
        yield f"# {key} =" if value is None else f"{key} = {render_value(value)}"
    for key in sections:
        section_type, section = types[key], values.get(key, {})
        assert isinstance(section_type, type)
        if not isinstance(section, Mapping):
            raise ValueError(f"--set {prefix}{key} must be a table: set {prefix}{key}.KEY=VALUE")
        yield f"\n[{prefix}{key}]"
        yield from _render_section(section_type, f"{prefix}{key}.", section)


def _example_value(config_field: Field[Any]) -> Any:
    if "example" in config_field.metadata:
        return config_field.metadata["example"]
    if config_field.default_factory is not MISSING:
        return config_field.default_factory()
    return config_field.default


def render_value(value: Any) -> str:
    """Render a value as TOML. TOML has no null, so the text "None" represents it."""
    if value is None:
        return json.dumps(NONE)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(render_value, value))}]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)


@functools.cache
def read_field_docs(config_type: type) -> dict[str, str]:
    """Read the string under each field, as one line. A subclass's field overrides its parent's.

    Python discards such strings, so they are read from the source. A class that was typed into an
    interpreter has no source.
    """
    docs: dict[str, str] = {}
    for parent in filter(is_dataclass, reversed(config_type.__mro__)):
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]
        except OSError:
            continue
        # E.g. the field `port: int = 8001` and the statement after it, `"""Port to listen on."""`.
        for field, doc in itertools.pairwise(
            definition.body if isinstance(definition, ast.ClassDef) else []
        ):
            text = doc.value if isinstance(doc, ast.Expr) else None
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Constant)
            ):
                docs[field.target.id] = " ".join(str(text.value).split())
    return docs


def require_port(setting: str, port: int) -> None:
    """Raise SettingError if the port is invalid. 0 is valid, and means any port or none."""
    if not 0 <= port < 1 << 16:
        raise SettingError(f"{{{setting}}} is {port}: a port is a number up to 65535")


def read_table(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Raises:
        ValueError: the file is not valid TOML.
    """
    try:
        return _parse(path.read_bytes().decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: byte {error.start} is not UTF-8") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not valid TOML ({error}); strings need quotes") from error
    except RecursionError as error:
        raise ValueError(f"{source} is not valid TOML: its values are nested too deeply") from error


def convert(value: Any, kind: Any, where: str, read_path: Callable[[str], Path]) -> Any:
    """Convert a TOML value to a `kind`.

    Raises:
        ValueError: the value has the wrong type; the message begins with `where`.
    """

    # msgspec does not support Path, so it calls this hook.
    def hook(wanted: type, found: Any) -> Any:
        if wanted is Path and isinstance(found, str):
            return read_path(found)
        raise ValueError(f"expected a path in quotes, got {found!r}")

    try:
        return msgspec.convert(value, kind, dec_hook=hook)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_explain(error, kind)}") from error


def _explain(error: msgspec.ValidationError, kind: Any) -> str:
    """Say which setting msgspec refused, and what it can be."""
    reason, _, place = str(error).partition(" - at `$")
    place = place.strip(".`")
    path = [*place.split(".")] if place else []
    if isinstance(error.__cause__, SettingError):
        return error.__cause__.spell(lambda name: ".".join([*path, name]))
    if missing := re.fullmatch("Object missing required field `(.*)`", reason):
        return f"{'.'.join([*path, missing[1]])} is missing"
    for name in path:
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    if choices := list_choices(kind):
        reason += f": choose from {', '.join(map(repr, choices))}"
    reason = reason[:1].lower() + reason[1:]
    return f"{place}: {reason}" if place else reason


def list_choices(kind: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, which may be optional; empty for other types."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((get_args(option) for option in options if get_origin(option) is Literal), ())


def describe_unknown(key: str, known: Sequence[str], section: str) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {section}{close[0]}?" if close else f"known are {', '.join(known)}"
    return f"there is no setting {section}{key}: {hint}"


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables recursively; values in `upper` take precedence."""
    nested = {
        key: merge(lower[key], value)
        for key, value in upper.items()
        if isinstance(value, dict) and isinstance(lower.get(key), dict)
    }
    # `nested` comes last, because it replaces tables of `upper` that do not have the keys of
    # `lower`.
    return {**lower, **upper, **nested}


def require_known(
    values: Mapping[str, Any], config_type: type, where: str, section: str = ""
) -> None:
    """Raise ValueError unless every key is a field; the message begins with `where`.

    msgspec would silently ignore an unknown key.
    """
    types = get_type_hints(config_type)
    known = [config_field.name for config_field in fields(config_type)]
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}{describe_unknown(key, known, section)}")
        if isinstance(value, dict) and is_dataclass(types[key]):
            nested = types[key]
            assert isinstance(nested, type)
            require_known(value, nested, where, f"{section}{key}.")
