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
    """A recipe with its settings and `main`, and its lines in the help."""

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
    """Module of the recipe. Empty for a command with parts."""
    summary: str
    example: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    default: str = ""
    """The part to run if the first argument names none. Empty if it must name one."""


COMMANDS = {
    "train": Command(
        Group.TRAIN,
        "redraft.recipes.train",
        "Train a draft of any family, prove it in a real vLLM",
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
        "Write a draft for another engine, and how to serve it",
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
            "anchors": Part(
                "redraft.recipes.serve.anchors",
                "Write offline data that the learner mixes with traffic",
                "redraft data anchors --target TARGET --data answers.jsonl",
            ),
            "count": Part(
                "redraft.recipes.data.count_answers",
                "Count the target's answers: a draft without training",
                "redraft data count --target TARGET --data answers.jsonl",
            ),
            "score": Part(
                "redraft.recipes.data.score",
                "Read recorded ids again with the target, for any engine",
                "redraft data score ids --target TARGET --spool spool",
            ),
            "import-gguf": Part(
                "redraft.recipes.data.import_gguf",
                "Turn a GGUF file into a folder for training and vLLM",
                "redraft data import-gguf MODEL.gguf models/target",
            ),
        },
        default="show",
    ),
    "regenerate": Command(
        Group.TRAIN,
        "redraft.recipes.data.regenerate",
        "Have the target answer a data set's prompts, to train on",
        "redraft regenerate --prompts DATA --output answers.jsonl",
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
        "Which draft, how many tokens: measure against plain vLLM",
        "redraft bench --target TARGET --draft DRAFT",
    ),
    "plan": Command(
        Group.DECIDE,
        "",
        "Count the cost of a training, a fleet or capture",
        "redraft plan --target llama-3.1-8b --devices 8",
        parts={
            "train": Part(
                "redraft.recipes.plan.plan",
                "Count the memory and work of a training, without a GPU",
                "redraft plan --target llama-3.1-8b --devices 8",
            ),
            "fleet": Part(
                "redraft.recipes.plan.fleet",
                "Count network, disk and compute of a fleet that learns",
                "redraft plan fleet --tokens-per-s 250000 --fraction 0.01",
            ),
            "capture": Part(
                "redraft.recipes.plan.capture",
                "Count the work of capture in a server's step",
                "redraft plan capture --requests 32 256",
            ),
        },
        default="train",
    ),
    "up": Command(
        Group.SERVE,
        "redraft.recipes.serve.up",
        "Serve a target, and train a draft for it: all in one",
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
        "Train on a fleet's traffic, test, swap, roll back",
        "redraft learner --config learner.toml",
    ),
    "tap": Command(
        Group.SERVE,
        "redraft.recipes.serve.tap",
        "Record from a vLLM that you cannot change, as a proxy",
        "redraft tap --help",
    ),
    "serve-features": Command(
        Group.SERVE,
        "redraft.recipes.serve.serve_features",
        "Serve a target's hidden states to heads in training",
        "redraft serve-features TARGET --layers 2 16 29",
    ),
    "fleet": Command(
        Group.SERVE,
        "",
        "Operate a fleet: versions, swaps, roll-back, keys",
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
                "Make the keys that open the ingest log",
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
