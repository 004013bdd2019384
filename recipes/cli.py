"""The `redraft` command: a table of subcommands, and the one place where an error becomes a line for its user.

Importing this module loads neither torch nor vLLM; a subcommand's recipe is imported when it is called.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRACEBACK_VARIABLE = "REDRAFT_TRACEBACK"


@dataclass(frozen=True)
class Command:
    """One subcommand: the recipe whose `Config` and `main` it runs, and what --help says of it."""

    module: str
    summary: str
    example: str


COMMANDS = {
    "doctor": Command(
        "recipes.doctor",
        "Check this environment, or a draft against its target",
        "redraft doctor --target TARGET --draft DRAFT",
    ),
    "distill": Command(
        "recipes.distill_llama3b",
        "Train a draft from its target, prove it in vLLM, report",
        "redraft distill --preset demo",
    ),
    "eagle3": Command(
        "recipes.eagle3_llama8b",
        "Train an EAGLE-3 head, prove it in vLLM, report",
        "redraft eagle3 --preset demo",
    ),
    "eagle1": Command(
        "recipes.eagle1_llama8b",
        "The same for an EAGLE-1 head",
        "redraft eagle1 --preset demo",
    ),
    "medusa": Command(
        "recipes.medusa_llama8b",
        "The same for Medusa heads",
        "redraft medusa --preset demo",
    ),
    "mtp": Command(
        "recipes.mtp_qwen3_next",
        "Tune a target's MTP layer, or train one; the same proof",
        "redraft mtp --preset demo",
    ),
    "mlp-speculator": Command(
        "recipes.mlp_speculator_llama8b",
        "The same for an MLPSpeculator, by the reference decoder",
        "redraft mlp-speculator --preset demo",
    ),
    "demo-heads": Command(
        "recipes.demo_heads",
        "All of these on the small target, side by side",
        "redraft demo-heads --resume",
    ),
    "eval": Command(
        "recipes.evaluate",
        "Report what a target accepts of its drafts, by domain",
        "redraft eval --target TARGET --draft DRAFT --draft ngram",
    ),
    "regenerate": Command(
        "recipes.regenerate",
        "Let the target answer a data set's prompts again",
        "redraft regenerate --help",
    ),
    "serve": Command(
        "recipes.serve",
        "Serve a target with its draft: vLLM with capture and swap",
        "redraft serve TARGET --draft DRAFT -- --port 8001",
    ),
    "serve-features": Command(
        "recipes.serve_features",
        "Serve a target's hidden states to heads in training",
        "redraft serve-features TARGET --layers 2 16 29",
    ),
    "tap": Command(
        "recipes.tap",
        "Record from a vLLM that cannot be touched, as its proxy",
        "redraft tap --help",
    ),
    "domains": Command(
        "recipes.domains",
        "Find the domains of prompts, for a draft each",
        "redraft domains --data prompts.jsonl --num-domains 4",
    ),
    "router": Command(
        "recipes.router",
        "Send requests to the servers with their domain's draft",
        "redraft router --config router.toml",
    ),
    "learner": Command(
        "recipes.learner",
        "Learn from a fleet's traffic: train, prove, swap, roll back",
        "redraft learner --config learner.toml",
    ),
    "anchors": Command(
        "recipes.anchors",
        "Write offline data for the learner to replay beside traffic",
        "redraft anchors --target TARGET --data answers.jsonl",
    ),
    "versions": Command(
        "recipes.versions",
        "List a draft's versions and what every server serves",
        "redraft versions --config learner.toml",
    ),
    "swap": Command(
        "recipes.swap",
        "Bring a version onto the fleet, by way of a canary",
        "redraft swap v000007 --config learner.toml",
    ),
    "rollback": Command(
        "recipes.rollback",
        "Return the fleet to the version before, at once",
        "redraft rollback --config learner.toml",
    ),
    "forget": Command(
        "recipes.forget",
        "Delete everything that was recorded of a tenant",
        "redraft forget acme --config learner.toml",
    ),
    "probe-log": Command(
        "recipes.probe_log",
        "Ask the ingest log's broker whether it still stores",
        "redraft probe-log nats://127.0.0.1:4222",
    ),
    "bench": Command(
        "recipes.bench",
        "Measure what drafts are worth in a real vLLM server",
        "redraft bench --preset demo",
    ),
    "advise": Command(
        "recipes.advise",
        "Say how many tokens to draft, and which kind of draft",
        "redraft advise --serving serving.json",
    ),
    "watch": Command(
        "recipes.watch",
        "Watch what a running fleet accepts, with an alarm",
        "redraft watch http://gpu1:8000 --min-tau 1.8",
    ),
    "capacity": Command(
        "recipes.capacity",
        "Say what capture, storage and learning take for a fleet",
        "redraft capacity --tokens-per-s 250000 --fraction 0.01",
    ),
    "tiny-target": Command(
        "recipes.tiny_target",
        "Train the small target of the demo and the tests",
        "redraft tiny-target --output outputs/tiny-target",
    ),
    "bench-ingest": Command(
        "recipes.bench_ingest",
        "Measure how fast records get from servers to the learner",
        "redraft bench-ingest",
    ),
    "bench-router": Command(
        "recipes.bench_router",
        "Measure what a router adds to a request",
        "redraft bench-router",
    ),
    "bench-training": Command(
        "recipes.bench_training",
        "Measure speed and memory of training, as ratios",
        "redraft bench-training",
    ),
    "bench-advice": Command(
        "recipes.bench_advice",
        "Check the advised number of draft tokens in the engine",
        "redraft bench-advice",
    ),
}


def main() -> None:
    """The console script."""
    try:
        status = dispatch(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `redraft ... | head` has read enough; without this Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def dispatch(args: Sequence[str]) -> int:
    """Run `redraft ARGS` and return its exit status: 0, or 2 for an error of the user's."""
    if not args or args[0] in ("-h", "--help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        print(f"redraft {importlib.metadata.version('redraft')}")
        return 0
    if args[0] not in COMMANDS:
        print(unknown(args[0]), file=sys.stderr)
        return 2
    return guarded(lambda: _run_command(args[0], args[1:]))


def run_recipe(
    main: Callable[[Any], object],
    config_type: type,
    description: str | None,
    presets: Mapping[str, Any] | None = None,
) -> None:
    """`main` of a recipe that is run as a file, with the config of the command line; ends the process on an error."""
    if status := guarded(lambda: main(parse(config_type, description, presets or {}, sys.argv[1:], prog=sys.argv[0]))):
        sys.exit(status)


def parse(
    config_type: type, description: str | None, presets: Mapping[str, Any], args: Sequence[str], *, prog: str
) -> Any:
    """A `config_type` from command-line arguments; `--preset NAME` chooses the defaults the other flags change.

    Raises: ValueError for an unknown preset; SystemExit(2) from tyro for anything else it cannot read.
    """
    import tyro  # a tenth of a second that `redraft --help` need not wait for

    name, rest = _take_preset(args)
    if name is not None and name not in presets:
        raise ValueError(f"there is no preset {name!r}{_choices(name, presets)}")
    if presets:
        description = (
            f"{description}\n--preset {{{','.join(presets)}}} sets other defaults; the other flags then change them."
        )
    default = {} if name is None else {"default": presets[name]}
    return tyro.cli(config_type, description=description, args=rest, prog=prog, **default)


def guarded(run: Callable[[], object]) -> int:
    """0 after `run`, or 2 after an error its user can mend, told in one line (REDRAFT_TRACEBACK=1: where it arose)."""
    try:
        run()
    except BrokenPipeError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        line = user_error(error)
        if line is None or os.environ.get(TRACEBACK_VARIABLE) == "1":
            raise
        print(f"redraft: {line}", file=sys.stderr)
        return 2
    return 0


def user_error(error: BaseException) -> str | None:
    """What to tell the user in one line, or None where the error is a defect of ours and needs its traceback."""
    httpx = sys.modules.get("httpx")  # where it was never imported, it raised nothing
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; `redraft doctor` says what to install"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError) or (httpx is not None and isinstance(error, httpx.HTTPError)):
        return " ".join(str(error).split()) or type(error).__name__
    return None


def help_text() -> str:
    """What `redraft --help` prints."""
    lines = ["Train drafts for speculative decoding, prove them in vLLM,"]
    lines += ["and keep them trained from live traffic.", ""]
    lines += ["usage: redraft COMMAND [flags]", ""]
    width = max(map(len, COMMANDS))
    for name, command in COMMANDS.items():
        lines += [f"  {name:<{width}}  {command.summary}", f"  {'':<{width}}    $ {command.example}"]
    lines += ["", "  redraft COMMAND --help   all flags of a command", "  redraft --version"]
    lines += ["", f"An error is one line and exit status 2; {TRACEBACK_VARIABLE}=1 shows its origin."]
    return "\n".join(lines)


def unknown(name: str) -> str:
    """What to say of a subcommand that does not exist."""
    return f"redraft: there is no command {name!r}{_choices(name, COMMANDS)}"


def _choices(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; there is {', '.join(known) or 'none'}"


def _run_command(name: str, args: Sequence[str]) -> None:
    recipe = importlib.import_module(COMMANDS[name].module)
    presets = getattr(recipe, "PRESETS", {})
    recipe.main(parse(recipe.Config, recipe.__doc__, presets, args, prog=f"redraft {name}"))


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
