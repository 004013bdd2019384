"""Run the `redraft` command.

The module finds the recipe, parses its flags, and turns an error into one line for the user.

Importing this module loads neither torch nor vLLM. For `--help`, a command's settings are imported
without them too.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from redraft.engine.proxies import reach_loopback
from redraft.files.artifact import is_full
from redraft.files.printable import printable, shorten
from redraft.files.setting_error import SettingError
from redraft.recipes.cli.commands import COMMANDS, Command, Group
from redraft.recipes.cli.wrapping import collecting, printing_spaces, wrap_prose

if TYPE_CHECKING:
    from redraft.recipes.cli.flags import Flag

TRACEBACK_VARIABLE = "REDRAFT_TRACEBACK"


def choose_environment(*, has_terminal: bool) -> dict[str, str]:
    """Return environment variables for libraries that read them at import.

    They do not replace variables that the user has set.
    """
    # A waiting OpenMP thread spins, and may occupy the core that a preempted thread needs. On two
    # cores with other work, a training step took ten times as long as with sleeping threads. Only
    # libgomp, which torch uses, reads this variable. OMP_WAIT_POLICY would also affect vLLM's
    # workers (libiomp5), whose speed was measured without it.
    chosen = {"GOMP_SPINCOUNT": "0"}
    if not has_terminal:
        # In seconds. For the progress bars that transformers and datasets draw themselves.
        chosen["TQDM_MININTERVAL"] = "10"
    return chosen


def main() -> None:
    for name, value in choose_environment(has_terminal=sys.stderr.isatty()).items():
        os.environ.setdefault(name, value)
    command = COMMANDS.get(sys.argv[1]) if sys.argv[1:] else None
    if command and command.group is Group.SERVE and command.module:
        outlive_readers()
    try:
        status = dispatch(sys.argv[1:])
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # `redraft ... | head` closes the pipe early; without this, Python prints an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


class _Outliving(io.FileIO):
    """A stream that discards writes, instead of raising, once the underlying stream fails."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_readers() -> None:
    """Let this process continue if its output fails, e.g. at a closed pipe or a full disk."""
    for name in ("stdout", "stderr"):
        now = getattr(sys, name)
        raw = _Outliving(now.fileno(), "w", closefd=False)
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), now.encoding, now.errors, line_buffering=True
        )
        setattr(sys, name, text)


def dispatch(args: Sequence[str]) -> int:
    """Run `redraft ARGS` and return its exit status: 0, or 2 for an error that the user can fix."""
    if not args or args[0] in ("-h", "--help", "--help-all"):
        print(format_help())
        return 0
    if args[0] == "--version":
        print(f"redraft {importlib.metadata.version('redraft')}")
        return 0
    if args[0] not in COMMANDS:
        choices = _choices(args[0], COMMANDS)
        print(f"redraft: there is no command {args[0]!r}{choices}", file=sys.stderr)
        return 2
    return run_guarded(lambda: _run(*find_recipe(args[0], args[1:])))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    main: Callable[[Any], object]
    config_type: type
    description: str | None
    presets: Mapping[str, Any] = field(default_factory=dict)
    default: Any = None
    """The config before any flags are applied. None if `config_type` has defaults for all
    fields.
    """
    common: Container[str] | None = None
    """Flags shown by `--help`, as "Class.field". None shows all flags."""
    prog: str

    @functools.cached_property
    def flags(self) -> "list[Flag]":
        """The flags of the config, without those that `parse_recipe` adds."""
        from redraft.recipes.cli.flags import list_flags, make_unchecked

        return list(list_flags(self.default or make_unchecked(self.config_type)))


def run_recipe(
    main: Callable[[Any], object],
    config_type: type,
    description: str | None,
    presets: Mapping[str, Any] | None = None,
    *,
    default: Any = None,
) -> None:
    """Run the `main` of a recipe that was started as a file, with the config from the command line.

    An error that the user can fix ends the process with one line and exit status 2.
    """
    recipe = Recipe(
        main=main, config_type=config_type, description=description, presets=presets or {}, default=default,
        prog=sys.argv[0],
    )  # fmt: skip
    run_choice(lambda args, _: (recipe, args))


def run_choice(choose: Callable[[Sequence[str], str], tuple[Recipe, Sequence[str]]]) -> None:
    """Like `run_recipe`, for a file whose first argument chooses the recipe."""

    if status := run_guarded(lambda: _run(*choose(sys.argv[1:], sys.argv[0]))):
        sys.exit(status)


def _run(recipe: Recipe, args: Sequence[str]) -> None:
    try:
        recipe.main(parse_recipe(recipe, args))
    except SettingError as error:
        from redraft.recipes.cli.flags import spell

        raise ValueError(spell(error, recipe.flags)) from error


def parse_recipe(recipe: Recipe, args: Sequence[str]) -> Any:
    """Parse a recipe's config from command-line arguments.

    The sources are, lowest priority first: the defaults, `--preset NAME`, the TOML file given by
    `--config FILE`, and the flags. `--print-config` prints the result as such a file, and exits.

    Raises:
        ValueError: a preset or a flag is unknown, a file is invalid, a flag is given twice or
            cannot be read, or the config refuses a value.
        SystemExit: 0 after `--help` and `--print-config`.
    """
    for argument in args:
        # Weights and reports cannot be written under such a name, so reject it before the run
        # starts.
        if any("\ud800" <= char <= "\udfff" for char in argument):
            raise ValueError(f"{argument} is not UTF-8: rename the file or folder")
    # The modules import tyro, which takes a tenth of a second, too long for `redraft --help`.
    from redraft.recipes.cli.config_file import read_config, render_config
    from redraft.recipes.cli.flags import make_unchecked, refuse_repeated, refuse_values

    notes, presets, default = [recipe.description or ""], recipe.presets, recipe.default
    # tyro does not support presets or files, so these flags are removed, and their values become
    # the defaults of the config.
    end = args.index("--") if "--" in args else len(args)
    rest, others = list(args[:end]), args[end:]
    refuse_repeated(rest, recipe.flags)
    refuse_values(rest, recipe.flags)
    name = _take_value(rest, "--preset")
    if name is not None and name not in presets:
        raise ValueError(f"there is no preset {name!r}{_choices(name, presets)}")
    if presets:
        notes += [
            f"--preset {{{','.join(presets)}}} sets other defaults; the other flags then change "
            "them."
        ]
    default = default if name is None else presets[name]
    prints, every, beside = False, _take_switch(rest, "--help-all"), ["--help", "--help-all"]
    if not {"config", "print_config"} & {
        field.name for field in dataclasses.fields(recipe.config_type)
    }:
        path, prints = _take_value(rest, "--config"), _take_switch(rest, "--print-config")
        beside += ["--config", "--print-config"]
        notes += [
            "--config FILE reads settings from a TOML file, and flags override them; "
            "--print-config prints one."
        ]
        if path is not None:
            default = read_config(Path(path), default or make_unchecked(recipe.config_type))
    if every or not {"--help", "-h"}.isdisjoint(rest):
        _print_help(recipe, default, notes, every=every)
    config = _parse_flags(recipe, default, rest, others, beside)
    if prints:
        print(render_config(config), end="")
        raise SystemExit(0)
    return config


def _print_help(recipe: Recipe, default: Any, notes: list[str], *, every: bool) -> None:
    """Print the notes and the flags, and raise SystemExit."""
    import tyro

    from redraft.recipes.cli.flags import make_registry

    common = None if every else recipe.common
    if common is not None:
        notes = [*notes, "--help-all prints all flags."]
    print("\n\n".join(map(wrap_prose, notes)) + "\n")
    with printing_spaces():
        tyro.cli(
            recipe.config_type,
            description="",  # tyro would not wrap it
            args=["--help"],
            prog=recipe.prog,
            # Help prints the form of a boolean flag that changes the default.
            config=(tyro.conf.FlagCreatePairsOff,),
            # This is only for the help: tyro does not parse a boolean flag that it hides.
            registry=make_registry(common),
            **({} if default is None else {"default": default}),
        )


def _parse_flags(
    recipe: Recipe,
    default: Any,
    args: Sequence[str],
    after: Sequence[str],
    beside: Sequence[str],
) -> Any:
    """Return the config for `args`, and for the arguments `after` a --.

    `beside` are flags that are not in the config. Raises ValueError instead of printing tyro's box
    of many lines.
    """
    import tyro

    from redraft.recipes.cli.flags import (
        RefusedConfigError,
        describe_refusal,
        make_registry,
        refuse_unknown,
        spell,
    )

    flags = recipe.flags
    cure = f"`{recipe.prog} --help{'' if recipe.common is None else '-all'}` lists all flags"
    if any(flag.field == "vllm_args" for flag in flags):
        cure += ", and flags for vLLM come after --"
    refuse_unknown(args, [*(form for flag in flags for form in flag.forms), *beside], cure)
    try:
        with collecting() as printed:
            config = tyro.cli(
                recipe.config_type,
                args=[*args, *after],
                prog=recipe.prog,
                registry=make_registry(),
                **({} if default is None else {"default": default}),
            )
    except RefusedConfigError as error:
        reason = error.reason
        if isinstance(reason, SettingError):
            reason = ValueError(spell(reason, flags, error.owner))
        raise reason from None
    except SystemExit:
        raise ValueError(f"{describe_refusal(printed.getvalue())}; {cure}") from None
    sys.stderr.write(printed.getvalue())  # warnings
    return config


def run_guarded(run: Callable[[], object]) -> int:
    """Call `run` and return 0, or print a user error as one line and return 2.

    With REDRAFT_TRACEBACK=1, the error is raised instead. Bugs in redraft are always raised.
    """
    reach_loopback(os.environ)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a test may have replaced the stream
        # A path or text with characters that the encoding lacks is shown escaped, so that it does
        # not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        run()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        line = describe_error(error)
        if line is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(f"redraft: {printable(line)}", file=sys.stderr)  # the message may quote a server
        return 2
    return 0


def describe_error(error: BaseException) -> str | None:
    """Return the line to show the user.

    Return None for a bug in redraft, which needs a traceback.
    """
    # The error cannot come from a module that has not been imported.
    httpx = sys.modules.get("httpx")
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; `redraft doctor` lists what to install"
    # Errors from the operating system have a `strerror`. Errors raised by redraft contain one
    # sentence: ConnectionError, ChildProcessError and TimeoutError are OSErrors too, and are
    # handled by the line below.
    if isinstance(error, OSError) and error.strerror:
        # In a failed rename, the second name is the one that the user gave.
        name = error.filename2 or error.filename
        return f"{error.strerror}: {name}" if name else error.strerror
    if isinstance(error, ValueError | OSError) or (
        httpx is not None and isinstance(error, httpx.HTTPError)
    ):
        return " ".join(str(error).split()) or type(error).__name__
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        reason = shorten(str(error))
        return (
            f"{reason}. Use smaller batches (for a training run, a smaller --loop.batch-size with a "
            "larger --optim.accumulation), or a GPU with more memory: `redraft plan` "
            "calculates what a training step needs"
        )
    if is_full(error):
        return f"no space left on a disk, or your quota or file size limit was reached: {error}"
    return None


def format_help() -> str:
    lines = ["Train draft models for speculative decoding, measure them in vLLM,"]
    lines += ["and keep them up to date with live traffic.", ""]
    lines += ["usage: redraft COMMAND [flags]"]
    width = max(map(len, COMMANDS))
    for group in Group:
        lines += ["", f"{group.value}:"]
        for name, command in COMMANDS.items():
            if command.group is group:
                lines += [
                    f"  {name:<{width}}  {command.summary}",
                    f"  {'':<{width}}    $ {command.example}",
                ]
    lines += ["", "  redraft COMMAND --help   all flags of a command", "  redraft --version"]
    lines += [
        "",
        f"An error is one line (exit status 2); {TRACEBACK_VARIABLE}=1 shows its traceback.",
    ]
    return "\n".join(lines)


def _choices(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; there is {', '.join(known) or 'none'}"


def find_recipe(name: str, args: Sequence[str]) -> tuple[Recipe, Sequence[str]]:
    """Return a command's recipe, and the remaining arguments for it.

    Raises:
        ValueError: there is no such part.
        SystemExit: the help for several parts was printed.
    """
    command, path = COMMANDS[name], COMMANDS[name].module
    if command.parts:
        name, path, args = _choose_part(name, command, args)
    # A module that imports torch has its config in a separate module, so that help and mistyped
    # flags do not wait for torch.
    config = f"{path}_config"
    module = importlib.import_module(config if importlib.util.find_spec(config) else path)
    if hasattr(module, "choose_recipe"):
        chosen: tuple[Recipe, Sequence[str]] = module.choose_recipe(args, f"redraft {name}")
        return chosen
    return (
        Recipe(
            main=lambda cfg: importlib.import_module(path).main(cfg),
            config_type=find_config_type(module),
            description=module.__doc__,
            presets=getattr(module, "PRESETS", {}),
            common=getattr(module, "COMMON", None),
            prog=f"redraft {name}",
        ),
        args,
    )


def find_config_type(module: ModuleType) -> type:
    """Return the type of a command's settings: its module's dataclass whose name ends in `Config`.

    It may be in a separate module (`MODULE_config`), next to other commands' settings.
    """
    (found,) = (
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and name.endswith("Config")
        and is_dataclass(value)
        and getattr(value, "__module__", "").startswith(module.__name__)
    )
    return found


def _choose_part(
    name: str, command: Command, args: Sequence[str]
) -> tuple[str, str, Sequence[str]]:
    """Return (words of the part, its module, the arguments after its name)."""
    first = args[0] if args else "--help"
    if first in command.parts:
        return f"{name} {first}", command.parts[first].module, args[1:]
    if first in ("-h", "--help", "--help-all"):
        print(format_parts(name, command))
        raise SystemExit(0)
    # The default part may take a file of such a name.
    is_misspelt = not Path(first).exists() and difflib.get_close_matches(first, command.parts)
    if is_misspelt or not command.default:
        raise ValueError(f"redraft {name} has no part {first!r}{_choices(first, command.parts)}")
    return f"{name} {command.default}", command.parts[command.default].module, args


def format_parts(name: str, command: Command) -> str:
    lines = [f"{command.summary}.", "", f"usage: redraft {name} PART [flags]", ""]
    width = max(map(len, command.parts))
    for part, recipe in command.parts.items():
        lines += [f"  {part:<{width}}  {recipe.summary}", f"  {'':<{width}}    $ {recipe.example}"]
    lines += ["", f"  redraft {name} PART --help   all flags of a part"]
    if command.default:
        lines += [f"  Without PART: {command.default}."]
    return "\n".join(lines)


def _take_value(args: list[str], flag: str) -> str | None:
    """Remove a flag from the arguments, and return its value, or None if it is not given."""
    for index, argument in enumerate(args):
        if argument.startswith(f"{flag}="):
            return args.pop(index).removeprefix(f"{flag}=")
        if argument == flag:
            if index + 1 == len(args) or args[index + 1].startswith("--"):
                raise ValueError(f"{flag} needs a value")
            del args[index]
            return args.pop(index)
    return None


def _take_switch(args: list[str], flag: str) -> bool:
    """Remove a flag without a value from the arguments, and return whether it was given."""
    found = flag in args
    args[:] = [word for word in args if word != flag]
    return found
