"""The table of subcommands, which `redraft --help` prints."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class Group(Enum):
    """A group of commands in `redraft --help`, in the order in which a new user needs them."""

    TRAIN = "Train a draft"
    DECIDE = "Decide which draft, and how many tokens"
    SERVE = "Serve, and learn from traffic"


@dataclass(frozen=True)
class Part:
    """A recipe: its settings, its `main` and its lines in the help."""

    module: str
    summary: str
    example: str


@dataclass(frozen=True)
class Command:
    """One subcommand, with its lines in `redraft --help`.

    It is either a recipe, or several parts, each with its own name.
    """

    group: Group
    module: str
    """Module of the recipe. Empty if the command has parts."""
    summary: str
    example: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    default: str = ""
    """The part to run if the first argument names none. Empty if it must name one."""


COMMANDS = {
    "train": Command(
        Group.TRAIN,
        "redraft.recipes.train",
        "Train a draft of any family and prove it in a real vLLM",
        "redraft train eagle3 --target TARGET --data.source DATA",
    ),
    "adapt": Command(
        Group.TRAIN,
        "redraft.recipes.adapt",
        "Adapt a draft to a fine-tune of the target",
        "redraft adapt OLD --target FINETUNED --data.source DATA",
    ),
    "export": Command(
        Group.TRAIN,
        "redraft.recipes.operate.export",
        "Convert a draft for a different engine",
        "redraft export DRAFT --engine sglang",
    ),
    "data": Command(
        Group.TRAIN,
        "",
        "Show what a draft would learn; prepare data",
        "redraft data answers.jsonl --target TARGET",
        parts={
            "show": Part(
                "redraft.recipes.data.show",
                "Show what a draft would learn from a data set",
                "redraft data show answers.jsonl --target TARGET",
            ),
            "count": Part(
                "redraft.recipes.data.count_answers",
                "Build a draft without training, from the target's answers",
                "redraft data count --target TARGET --data answers.jsonl",
            ),
            "score": Part(
                "redraft.recipes.data.score",
                "Complete recorded token ids with the target's outputs",
                "redraft data score ids --target TARGET --spool spool",
            ),
            "import-gguf": Part(
                "redraft.recipes.data.import_gguf",
                "Convert a GGUF file into a model folder",
                "redraft data import-gguf MODEL.gguf models/target",
            ),
        },
        default="show",
    ),
    "regenerate": Command(
        Group.TRAIN,
        "redraft.recipes.data.regenerate",
        "Generate training data: the target's answers to prompts",
        "redraft regenerate --prompts DATA --output answers.jsonl",
    ),
    "eval": Command(
        Group.DECIDE,
        "redraft.recipes.decide.evaluate",
        "Measure how many draft tokens the target accepts",
        "redraft eval --target TARGET --draft DRAFT --draft ngram",
    ),
    "bench": Command(
        Group.DECIDE,
        "redraft.recipes.decide.bench",
        "Find the fastest draft, measured against plain vLLM",
        "redraft bench --target TARGET --draft DRAFT",
    ),
    "plan": Command(
        Group.DECIDE,
        "",
        "Calculate the cost of training, of a fleet or of capture",
        "redraft plan --target llama-3.1-8b --devices 8",
        parts={
            "train": Part(
                "redraft.recipes.plan.plan",
                "Calculate the memory and compute of a training run",
                "redraft plan --target llama-3.1-8b --devices 8",
            ),
            "fleet": Part(
                "redraft.recipes.plan.fleet",
                "Calculate network, disk and compute of a learning fleet",
                "redraft plan fleet --tokens-per-s 250000 --fraction 0.01",
            ),
            "capture": Part(
                "redraft.recipes.plan.capture",
                "Calculate what capture adds to a server's step",
                "redraft plan capture --requests 32 256",
            ),
        },
        default="train",
    ),
    "up": Command(
        Group.SERVE,
        "redraft.recipes.serve.up",
        "Serve a target and train a draft for it, all in one",
        "redraft up TARGET -- --port 8000",
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
        "Train on a fleet's traffic, test, roll out, roll back",
        "redraft learner --config learner.toml",
    ),
    "tap": Command(
        Group.SERVE,
        "redraft.recipes.serve.tap",
        "Record a server that you cannot change, as a proxy",
        "redraft tap --help",
    ),
    "serve-features": Command(
        Group.SERVE,
        "redraft.recipes.serve.serve_features",
        "Serve a target's hidden states, to train heads",
        "redraft serve-features TARGET --layers 2 16 29",
    ),
    "fleet": Command(
        Group.SERVE,
        "",
        "Operate a fleet: versions, swaps, rollback, keys",
        "redraft fleet versions --config learner.toml",
        parts={
            "versions": Part(
                "redraft.recipes.operate.versions",
                "List a draft's versions, and the version on each server",
                "redraft fleet versions --config learner.toml",
            ),
            "swap": Part(
                "redraft.recipes.operate.swap",
                "Roll a version out to the fleet, after a canary",
                "redraft fleet swap v000007 --config learner.toml",
            ),
            "rollback": Part(
                "redraft.recipes.operate.rollback",
                "Return the fleet to the previous version at once",
                "redraft fleet rollback --config learner.toml",
            ),
            "forget": Part(
                "redraft.recipes.operate.forget",
                "Delete everything recorded from a tenant",
                "redraft fleet forget acme --config learner.toml",
            ),
            "token": Part(
                "redraft.recipes.operate.make_token",
                "Create the token that protects the routes for swaps",
                "redraft fleet token FILE",
            ),
            "keys": Part(
                "redraft.recipes.operate.log_keys",
                "Create the keys for the ingest log",
                "redraft fleet keys keys",
            ),
            "probe": Part(
                "redraft.recipes.operate.probe_log",
                "Check that the ingest log's broker still stores records",
                "redraft fleet probe nats://127.0.0.1:4222",
            ),
        },
    ),
    "doctor": Command(
        Group.DECIDE,
        "redraft.recipes.operate.doctor",
        "Check this environment, or a draft against its target",
        "redraft doctor --target TARGET --draft DRAFT",
    ),
}


def list_recipes() -> Iterator[tuple[str, str]]:
    """Return (words after `redraft`, module) for every recipe.

    For example, ("fleet swap", "redraft.recipes.operate.swap").
    """
    for name, command in COMMANDS.items():
        if command.module:
            yield name, command.module
        for part, recipe in command.parts.items():
            yield f"{name} {part}", recipe.module
