"""The `redraft` command: a table of subcommands, and the one place where an error becomes a line for the user.

Importing this module loads neither torch nor vLLM. A subcommand's recipe is imported when it is called; for `--help`,
without the slow libraries (`recipes.help.stand_ins`).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

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


class Group(Enum):
    """The headings of `redraft --help`, in the order in which a new user needs them."""

    TRAIN = "Train a draft"
    DECIDE = "Decide which draft, and how many tokens"
    SERVE = "Serve, and learn from traffic"
    OPERATE = "Operate a fleet"
    OURS = "Our own demos and benchmarks"


@dataclass(frozen=True)
class Command:
    """One subcommand: the recipe with `Config` and `main`, and the lines in `redraft --help`."""

    group: Group
    module: str
    summary: str
    example: str


COMMANDS = {
    "distill": Command(
        Group.TRAIN,
        "redraft.recipes.distill_llama3b",
        "Train a standalone draft model on its target's predictions",
        "redraft distill --preset demo",
    ),
    "eagle3": Command(
        Group.TRAIN,
        "redraft.recipes.eagle3_llama8b",
        "Train an EAGLE-3 head",
        "redraft eagle3 --preset demo",
    ),
    "eagle1": Command(
        Group.TRAIN,
        "redraft.recipes.eagle1_llama8b",
        "Train an EAGLE-1 head",
        "redraft eagle1 --preset demo",
    ),
    "medusa": Command(
        Group.TRAIN,
        "redraft.recipes.medusa_llama8b",
        "Train Medusa heads",
        "redraft medusa --preset demo",
    ),
    "mtp": Command(
        Group.TRAIN,
        "redraft.recipes.mtp_qwen3_next",
        "Tune the target's own MTP layer, or train a new one",
        "redraft mtp --preset demo",
    ),
    "mlp-speculator": Command(
        Group.TRAIN,
        "redraft.recipes.mlp_speculator_llama8b",
        "Train an MLPSpeculator (vLLM cannot serve it)",
        "redraft mlp-speculator --preset demo",
    ),
    "regenerate": Command(
        Group.TRAIN,
        "redraft.recipes.regenerate",
        "Have the target answer a data set's prompts, to train on",
        "redraft regenerate --source DATA --output answers.jsonl",
    ),
    "import-gguf": Command(
        Group.TRAIN,
        "redraft.recipes.import_gguf",
        "Turn a GGUF file into a folder for training and vLLM",
        "redraft import-gguf MODEL.gguf models/target",
    ),
    "data": Command(
        Group.TRAIN,
        "redraft.recipes.decide.data",
        "Show what a draft would learn from a data set",
        "redraft data answers.jsonl --target TARGET",
    ),
    "eval": Command(
        Group.DECIDE,
        "redraft.recipes.decide.evaluate",
        "Report how many tokens a target accepts, by domain",
        "redraft eval --target TARGET --draft DRAFT --draft ngram",
    ),
    "bench": Command(
        Group.DECIDE,
        "redraft.recipes.decide.bench",
        "Measure how much faster drafts make a real vLLM server",
        "redraft bench --preset demo",
    ),
    "advise": Command(
        Group.DECIDE,
        "redraft.recipes.decide.advise",
        "Recommend a draft and a number of draft tokens",
        "redraft advise --serving serving.json",
    ),
    "capacity": Command(
        Group.DECIDE,
        "redraft.recipes.decide.capacity",
        "Size capture, storage and learning for a fleet",
        "redraft capacity --tokens-per-s 250000 --fraction 0.01",
    ),
    "serve": Command(
        Group.SERVE,
        "redraft.recipes.serve.serve",
        "Start vLLM with a draft, ready for capture and swaps",
        "redraft serve TARGET --draft DRAFT -- --port 8001",
    ),
    "learner": Command(
        Group.SERVE,
        "redraft.recipes.serve.learner",
        "Train on a fleet's traffic, test, swap, roll back",
        "redraft learner --config learner.toml",
    ),
    "anchors": Command(
        Group.SERVE,
        "redraft.recipes.serve.anchors",
        "Write offline data that the learner mixes with traffic",
        "redraft anchors --target TARGET --data answers.jsonl",
    ),
    "tap": Command(
        Group.SERVE,
        "redraft.recipes.serve.tap",
        "Record from a vLLM that you cannot change, as a proxy",
        "redraft tap --help",
    ),
    "domains": Command(
        Group.SERVE,
        "redraft.recipes.serve.domains",
        "Cluster prompts into domains, to train a draft for each",
        "redraft domains --data prompts.jsonl --num-domains 4",
    ),
    "router": Command(
        Group.SERVE,
        "redraft.recipes.serve.router",
        "Route each request to a server with its domain's draft",
        "redraft router --config router.toml",
    ),
    "serve-features": Command(
        Group.SERVE,
        "redraft.recipes.serve.serve_features",
        "Serve a target's hidden states to heads in training",
        "redraft serve-features TARGET --layers 2 16 29",
    ),
    "token": Command(
        Group.OPERATE,
        "redraft.recipes.operate.make_token",
        "Create the token that protects the routes for swaps",
        "redraft token FILE",
    ),
    "doctor": Command(
        Group.OPERATE,
        "redraft.recipes.operate.doctor",
        "Check this environment, or a draft against its target",
        "redraft doctor --target TARGET --draft DRAFT",
    ),
    "watch": Command(
        Group.OPERATE,
        "redraft.recipes.operate.watch",
        "Watch the acceptance of running servers, with an alarm",
        "redraft watch http://gpu1:8000 --min-tau 1.8",
    ),
    "versions": Command(
        Group.OPERATE,
        "redraft.recipes.operate.versions",
        "List a draft's versions, and the version on each server",
        "redraft versions --config learner.toml",
    ),
    "swap": Command(
        Group.OPERATE,
        "redraft.recipes.operate.swap",
        "Roll a version out to the fleet, after a canary",
        "redraft swap v000007 --config learner.toml",
    ),
    "rollback": Command(
        Group.OPERATE,
        "redraft.recipes.operate.rollback",
        "Return the fleet to the previous version at once",
        "redraft rollback --config learner.toml",
    ),
    "forget": Command(
        Group.OPERATE,
        "redraft.recipes.operate.forget",
        "Delete everything recorded from a tenant",
        "redraft forget acme --config learner.toml",
    ),
    "probe-log": Command(
        Group.OPERATE,
        "redraft.recipes.operate.probe_log",
        "Check that the ingest log's broker still stores records",
        "redraft probe-log nats://127.0.0.1:4222",
    ),
    "log-keys": Command(
        Group.OPERATE,
        "redraft.recipes.operate.log_keys",
        "Make the keys that open the ingest log",
        "redraft log-keys keys",
    ),
    "demo-heads": Command(
        Group.OURS,
        "redraft.recipes.demo.heads",
        "Train every family of heads on the small target",
        "redraft demo-heads --resume",
    ),
    "tiny-target": Command(
        Group.OURS,
        "redraft.recipes.demo.tiny_target",
        "Train the small target of the demos and the tests",
        "redraft tiny-target --output outputs/tiny-target",
    ),
    "bench-training": Command(
        Group.OURS,
        "redraft.recipes.bench.training",
        "Measure the speed and memory of training, as ratios",
        "redraft bench-training",
    ),
    "bench-ingest": Command(
        Group.OURS,
        "redraft.recipes.bench.ingest",
        "Measure how fast records reach the learner",
        "redraft bench-ingest",
    ),
    "bench-router": Command(
        Group.OURS,
        "redraft.recipes.bench.router",
        "Measure the latency that the router adds",
        "redraft bench-router",
    ),
    "bench-decisions": Command(
        Group.OURS,
        "redraft.recipes.bench.decisions",
        "Simulate how often gate, canary and reports err",
        "redraft bench-decisions",
    ),
    "bench-advice": Command(
        Group.OURS,
        "redraft.recipes.bench.advice",
        "Check the advised number of draft tokens in vLLM",
        "redraft bench-advice",
    ),
}


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

    from redraft.recipes.help.flags import registry

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
        from redraft.recipes.help.stand_ins import stand_ins

        with stand_ins():
            _parse_for(name, args)  # prints the help and raises SystemExit
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


if __name__ == "__main__":
    main()
