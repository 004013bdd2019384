"""Read a dataclass from the command line, with every field's docstring as flowing help text.

By itself, tyro keeps a docstring's line break if the next line is indented, which breaks sentences,
and shows the default of an empty tuple as `(default: )`. The rule below avoids both.
"""

import dataclasses
import difflib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Collection, Container, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from redraft.files.setting_error import SettingError
from redraft.files.settings import list_choices, read_field_docs
from redraft.recipes.cli.wrapping import hold_commands

UNREADABLE = re.compile(r"Error parsing (\S+): (.*?('[^']*').*)")
"""tyro's message about a value of the wrong type: flag, reason, value."""
WANTED = re.compile(r"no type matching (?:\{None\}\|)?(\S+)|.*?\b(int|float)\b")
"""The type in such a reason. `None` is a default, and nobody types it."""


class RefusedConfigError(Exception):
    """The dataclass `owner` refused its values for `reason`.

    This is not a ValueError, which tyro would catch and print in a box.
    """

    def __init__(self, reason: ValueError, owner: type) -> None:
        super().__init__(reason)
        self.reason, self.owner = reason, owner


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, and the field that it sets."""

    name: str
    """As typed, e.g. --prove.max-tokens. For a positional argument, its name in the help."""
    owner: type
    """The dataclass that has the field."""
    field: str
    is_switch: bool = False
    is_repeatable: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """All forms that the parser takes. Empty for a positional argument."""
        if not self.name.startswith("--"):
            return ()
        table, dot, last = self.name.removeprefix("--").rpartition(".")
        return (self.name, f"--{table}{dot}no-{last}") if self.is_switch else (self.name,)


def make_registry(common: Container[str] | None = None) -> ConstructorRegistry:
    """Return a registry with `describe_dataclass` as tyro's rule for dataclasses.

    The help omits flags whose "Class.field" is not in `common`. If `common` is None, it omits none.
    """
    registry = ConstructorRegistry()
    registry.struct_rule(functools.partial(describe_dataclass, common=common))
    return registry


def describe_dataclass(
    info: StructTypeInfo, *, common: Container[str] | None = None
) -> StructConstructorSpec | None:
    """Return a dataclass's fields with folded help. A rejected value raises RefusedConfigError."""
    if not dataclasses.is_dataclass(info.type):
        return None
    hints = get_type_hints(info.type, include_extras=True)
    docs = read_field_docs(info.type)
    fields = []
    for field in dataclasses.fields(info.type):
        if not field.init:
            continue
        # tyro takes the hint as the flag's type, so changes of the help text are annotations.
        hint, default = hints[field.name], _find_default(field, info.default)
        if isinstance(hint, TypeVar):  # for a family's options, the default determines the class
            hint = type(default)
        if common is not None and not dataclasses.is_dataclass(default):
            *_, owner = (
                base for base in info.type.__mro__ if field.name in inspect.get_annotations(base)
            )
            if f"{owner.__name__}.{field.name}" not in common:
                hint = Annotated[hint, tyro.conf.Suppress]
        text = docs.get(field.name)
        text = None if text is None else hold_commands(text)
        if common is not None and text is not None:
            first, *others = text.split(". ")  # `--help-all` prints the full text
            text = ". ".join([first, *(one for one in others if one.startswith("Default: "))])
            text = text.rstrip(".") + "."
        if default is True and text is not None:  # help prints --no-FLAG
            text = f"Do not {text[0].lower()}{text[1:]}"
        if (note := _describe_default(hint, default, text or "")) is not None:
            hint = Annotated[hint, tyro.conf.arg(help_behavior_hint=note)]
        if metavar := choose_metavar(field.name, hint):
            hint = Annotated[hint, tyro.conf.arg(metavar=metavar)]
        fields.append(StructFieldSpec(name=field.name, type=hint, default=default, helptext=text))

    def instantiate(**values: Any) -> Any:
        try:
            return info.type(**values)
        except ValueError as error:
            raise RefusedConfigError(error, info.type) from error

    return StructConstructorSpec(instantiate=instantiate, fields=tuple(fields))


def _describe_default(hint: Any, default: Any, text: str) -> str | None:
    """Return the note on a flag's default in the help. Return None to keep tyro's own note."""
    if tyro.conf.UseAppendAction in getattr(hint, "__metadata__", ()):
        return None  # tyro already marks the flag as repeatable
    if default is None and "default" in text.lower():
        return ""
    if default is None or default in ((), "", {}):
        return "(default: none)"
    if default is True:  # the flag is --no-FLAG
        return ""
    # A required positional argument for which tyro would accept no value.
    return "(required)" if default is tyro.MISSING_NONPROP else None


def choose_metavar(name: str, hint: Any) -> str | None:
    """Return the word for a value in the help, e.g. TARGET.

    Return None to keep tyro's own (INT, or choices).

    Text and paths are named after their field. An optional value is shown without its `None`, and
    a tuple with the name of one of its elements.
    """
    markers = getattr(hint, "__metadata__", ())
    plain = hint.__origin__ if markers else hint
    options = [option for option in get_args(plain) if option is not NoneType]
    is_optional = get_origin(plain) in (Union, UnionType)
    if is_optional and len(options) == 1:
        (plain,) = options
    is_tuple = get_origin(plain) is tuple
    element = get_args(plain)[0] if is_tuple else plain
    word = {int: "INT", float: "FLOAT"}.get(element)
    if element in (str, Path):
        word = (name.removesuffix("s") if is_tuple else name).upper()
    elif is_optional and (choices := (True, False) if element is bool else list_choices(element)):
        word = f"{{{','.join(map(str, choices))}}}"
    if word is None or tyro.conf.UseAppendAction in markers or not is_tuple:
        return word
    return f"[{word} [{word} ...]]"


def refuse_repeated(args: Sequence[str], flags: Sequence[Flag]) -> None:
    """Raise ValueError for a flag given twice, because tyro silently drops the first value."""
    given = Counter(
        word.partition("=")[0].replace("_", "-") for word in args if word.startswith("--")
    )
    for flag in flags:  # --no-FLAG is the same flag
        for form in flag.forms[1:]:
            given[flag.name] += given.pop(form, 0)
    repeatable = {flag.name for flag in flags if flag.is_repeatable}
    twice = (name for name, count in given.items() if count > 1 and name not in repeatable)
    if name := next(twice, None):
        raise ValueError(f"{name} is given {given[name]} times: give it once")


def refuse_values(args: Sequence[str], flags: Sequence[Flag]) -> None:
    """Raise ValueError for a switch with a value, of which tyro names only the value."""
    switches = {form: flag.forms for flag in flags if flag.is_switch for form in flag.forms}
    for name, equals, _ in (word.partition("=") for word in args):
        if equals and (forms := switches.get(name.replace("_", "-"))):
            raise ValueError(f"{name} takes no value: give {' or '.join(forms)}")


def list_flags(config: Any, prefix: str = "--") -> Iterator[Flag]:
    """Yield the flags of a config and of its nested dataclasses."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        name = prefix + field.name.replace("_", "-")
        markers = getattr(hint, "__metadata__", ())
        if dataclasses.is_dataclass(hint) and not dataclasses.is_dataclass(value):
            value = make_unchecked(cast(type[Any], hint))  # a table without a default
        if dataclasses.is_dataclass(value):
            yield from list_flags(value, f"{name}.")
        elif field.init:
            is_positional = tyro.conf.Positional in markers
            yield Flag(
                name=field.name.upper() if is_positional else name,
                owner=type(config),
                field=field.name,
                is_switch=(hint.__origin__ if markers else hint) is bool,
                is_repeatable=tyro.conf.UseAppendAction in markers,
            )


def spell(error: SettingError, flags: Sequence[Flag], owner: type | None = None) -> str:
    """Return the message with settings named as flags.

    A field of `owner`, if given, is found before others with the same name. A field without a flag
    keeps its name.
    """

    def name(field: str) -> str:
        found = [flag for flag in flags if flag.field == field]
        of_owner = [flag for flag in found if flag.owner is owner]
        return next((flag.name for flag in of_owner or found), field)

    return error.spell(name)


def refuse_unknown(args: Sequence[str], known: Collection[str], cure: str) -> None:
    """Raise ValueError for a flag that is not among the `known`, with the closest of them.

    By itself, tyro prints a box of many lines, and gives the flag to a missing positional argument.
    """
    for word in args:
        flag = word.partition("=")[0].replace("_", "-")
        if flag.startswith("--") and flag not in known:
            close = _find_close(flag, known)
            hint = f": did you mean {close}? {cure}" if close else f": {cure}"
            raise ValueError(f"there is no flag {word.partition('=')[0]}{hint}")


def _find_close(flag: str, known: Collection[str]) -> str | None:
    """Return the known flag with the same last part, e.g. --optim.lr for --lr, or a similar one."""
    asked, words = flag.removeprefix("--"), [one.removeprefix("--") for one in known]
    same = [word for word in words if word.rpartition(".")[2] == asked.rpartition(".")[2]]
    # 0.7 finds a swapped, missing or repeated letter in the shortest names.
    close = difflib.get_close_matches(asked, same or words, n=1, cutoff=0 if same else 0.7)
    return f"--{close[0]}" if close else None


def describe_refusal(box: str) -> str:
    """Return the reason in a box that tyro printed, in one line, without the flag's help below it.

    The box was printed to a stream without an encoding, so its lines consist of dashes.
    """
    title, *parts = re.split(r"^ *-{3,} *$", box, flags=re.MULTILINE)
    lines = [line for line in (parts[0] if parts else title).splitlines() if line.strip()]
    if lines and lines[0].strip().startswith("Missing from"):
        # Each flag is followed by its help, which is indented more.
        depth = min(len(line) - len(line.lstrip()) for line in lines[1:])
        names = [line.strip() for line in lines[1:] if not line[depth:].startswith(" ")]
        return f"missing: {', '.join(names)}"
    reason = " ".join(" ".join(lines).split()).rstrip(".") or title.strip()
    if found := UNREADABLE.match(reason):
        flag, why, given = found.groups()
        wanted = WANTED.match(why)
        give = f": give {(wanted[1] or wanted[2]).upper()}" if wanted else ""
        return f"{flag} cannot be {given}{give}"
    return reason


def make_unchecked(config_type: type[Any]) -> Any:
    """Return an unvalidated config with the defaults. Fields without a default are missing."""
    config = object.__new__(config_type)
    vars(config).update(
        {field.name: _find_default(field, None) for field in dataclasses.fields(config_type)}
    )
    return config


def _find_default(field: dataclasses.Field[Any], owner: Any) -> Any:
    """Return a field's default: its value in `owner`, if there is one for the whole dataclass.

    Otherwise, it is the field's own default.
    """
    if dataclasses.is_dataclass(owner):
        return getattr(owner, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    # MISSING makes all fields below required, even those with defaults. MISSING_NONPROP makes only
    # this one required.
    missing = tyro.MISSING if owner is tyro.MISSING else tyro.MISSING_NONPROP
    return missing if field.default is dataclasses.MISSING else field.default
