"""Run the `redraft` command: find the recipe, parse its flags, turn an error into one line for the user.

Importing this module loads neither torch nor vLLM. A subcommand's recipe is imported when it is called; for `--help`,
without the slow libraries (`stand_ins`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.recipes.cli.commands import COMMANDS, Group

TRACEBACK_VARIABLE = "REDRAFT_TRACEBACK"


def choose_environment(*, has_terminal: bool) -> dict[str, str]:
    """Variables of a process and its children, for libraries that read them when they are imported.

    A variable that the user has set stays as it is.
    """
    # An OpenMP thread that waits for the others spins, and takes the core that a preempted one needs: on two cores with
    # other work, a training step took ten times as long as with threads that sleep. Only libgomp, which torch uses,
    # reads this variable. OMP_WAIT_POLICY would reach vLLM's workers (libiomp5) too, which have measured speeds.
    chosen = {"GOMP_SPINCOUNT": "0"}
    if not has_terminal:
        chosen["TQDM_MININTERVAL"] = "10"  # seconds; the bars of transformers and datasets, which are not ours
    return chosen


def main() -> None:
    """Run the console script."""
    for name, value in choose_environment(has_terminal=sys.stderr.isatty()).items():
        os.environ.setdefault(name, value)
    try:
        status = dispatch(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `redraft ... | head` has read enough; without this Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def dispatch(args: Sequence[str]) -> int:
    """Run `redraft ARGS` and return its exit status: 0, or 2 for an error that the user can fix."""
    if not args or args[0] in ("-h", "--help"):
        print(format_help())
        return 0
    if args[0] == "--version":
        print(f"redraft {importlib.metadata.version('redraft')}")
        return 0
    if args[0] not in COMMANDS:
        print(describe_unknown(args[0]), file=sys.stderr)
        return 2
    return run_guarded(lambda: _run_command(args[0], args[1:]))


def run_recipe(
    main: Callable[[Any], object],
    config_type: type,
    description: str | None,
    presets: Mapping[str, Any] | None = None,
) -> None:
    """Run the `main` of a recipe started as a file, with the config of the command line.

    An error that the user can fix ends the process with one line and exit status 2.
    """
    if status := run_guarded(
        lambda: main(parse(config_type, description, presets or {}, sys.argv[1:], prog=sys.argv[0]))
    ):
        sys.exit(status)


def parse(
    config_type: type, description: str | None, presets: Mapping[str, Any], args: Sequence[str], *, prog: str
) -> Any:
    """A `config_type` from command-line arguments. `--preset NAME` chooses other defaults.

    Raises: ValueError for an unknown preset; SystemExit(2) from tyro for anything unreadable.
    """
    import tyro  # a tenth of a second, too long for `redraft --help`

    from redraft.recipes.cli.flags import registry

    # tyro knows no presets: the flag is taken out, and becomes the default of the whole config.
    name, rest = _take_preset(args)
    if name is not None and name not in presets:
        raise ValueError(f"there is no preset {name!r}{_choices(name, presets)}")
    if presets:
        description = (
            f"{description}\n--preset {{{','.join(presets)}}} sets other defaults; the other flags then change them."
        )
    default = {} if name is None else {"default": presets[name]}
    return tyro.cli(config_type, description=description, args=rest, prog=prog, registry=registry, **default)


def run_guarded(run: Callable[[], object]) -> int:
    """Call `run` and return 0; or print an error of the user's in one line, and return 2.

    With REDRAFT_TRACEBACK=1, raise the error instead, to show the traceback. A defect of ours, for
    which `describe_error` has no line, is always raised.
    """
    try:
        run()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        line = describe_error(error)
        if line is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(f"redraft: {line}", file=sys.stderr)
        return 2
    return 0


def describe_error(error: BaseException) -> str | None:
    """The line to tell the user, or None if the error is a defect of ours and needs a traceback."""
    httpx = sys.modules.get("httpx")  # if nothing has imported it, the error cannot come from it
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; `redraft doctor` says what to install"
    # The system's errors have a `strerror`. Ours are raised with one sentence: ConnectionError,
    # ChildProcessError and TimeoutError are OSErrors too, and fall through to the line below.
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError) or (httpx is not None and isinstance(error, httpx.HTTPError)):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def format_help() -> str:
    """The text of `redraft --help`."""
    lines = ["Train draft models for speculative decoding, prove them in vLLM,"]
    lines += ["and keep them trained from live traffic.", ""]
    lines += ["usage: redraft COMMAND [flags]"]
    width = max(map(len, COMMANDS))
    for group in Group:
        lines += ["", f"{group.value}:"]
        for name, command in COMMANDS.items():
            if command.group is group:
                lines += [f"  {name:<{width}}  {command.summary}", f"  {'':<{width}}    $ {command.example}"]
    lines += ["", "  redraft COMMAND --help   all flags of a command", "  redraft --version"]
    lines += ["", f"An error is one line and exit status 2; {TRACEBACK_VARIABLE}=1 shows its origin."]
    return "\n".join(lines)


def describe_unknown(name: str) -> str:
    """The error for an unknown subcommand."""
    return f"redraft: there is no command {name!r}{_choices(name, COMMANDS)}"


def _choices(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; there is {', '.join(known) or 'none'}"


def _run_command(name: str, args: Sequence[str]) -> None:
    if _asks_for_help(args):
        from redraft.recipes.cli.stand_ins import stand_ins

        with stand_ins():
            _parse_for(name, args)  # prints the help and raises SystemExit
    # The heavy libraries are imported here, after --help has had the chance to end.
    recipe, cfg = _parse_for(name, args)
    recipe.main(cfg)


def _parse_for(name: str, args: Sequence[str]) -> tuple[Any, Any]:
    """A command's module and config."""
    recipe = importlib.import_module(COMMANDS[name].module)
    presets = getattr(recipe, "PRESETS", {})
    return recipe, parse(recipe.Config, recipe.__doc__, presets, args, prog=f"redraft {name}")


def _asks_for_help(args: Sequence[str]) -> bool:
    """Whether --help is among the arguments of ours, which end at a `--`."""
    ours = args[: args.index("--")] if "--" in args else args
    return "--help" in ours or "-h" in ours


def _take_preset(args: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --preset (before any `--`), and the arguments without it."""
    rest = list(args)
    end = rest.index("--") if "--" in rest else len(rest)
    for index, argument in enumerate(rest[:end]):
        if argument.startswith("--preset="):
            return argument.removeprefix("--preset="), rest[:index] + rest[index + 1 :]
        if argument == "--preset":
            if index + 1 == end:
                raise ValueError("--preset needs a name")
            return rest[index + 1], rest[:index] + rest[index + 2 :]
    return None, rest
