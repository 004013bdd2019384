"""The settings of a training run. Without torch, so `--help` and a config file load fast.

    TrainConfig                  of every family
      ├─ HeadConfig[Options]     of heads: `head` holds the family's options (`heads.options`)
      └─ StandaloneConfig        of standalone drafts

`make_config` gives the defaults of a family, from its row in `heads.catalog`."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import tyro

from redraft.distill.data.day import choose_day
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.storage import DEFAULT_STORAGE, HiddenDtype
from redraft.distill.train.optim import Optim
from redraft.engine.target_dtype import TargetDtype
from redraft.heads.family import NUM_TOKENS, Family
from redraft.heads.options import Standalone

Options = TypeVar("Options")


def require_least(config: Any, group: str = "", **least: int) -> None:
    """Raise ValueError, with the flag, if a number in a config is below its minimum.

    A value of None passes.
    """
    for name, number in least.items():
        if (value := getattr(config, name)) is not None and value < number:
            raise ValueError(
                f"--{group}{name.replace('_', '-')} is {value}: give at least {number}"
            )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text to train on, and held-out text to evaluate on."""

    source: str = "HuggingFaceH4/ultrachat_200k"
    """Conversations to train on: a hub name, a .jsonl, .json or .parquet file (also .gz or .zst), a
    folder of such files or of text, or `stdlib` (code and prose from the Python installation).
    Drafts learn best from answers of the target: see `redraft regenerate`.
    """
    split: str = "train_sft"
    """Split of a hub data set."""
    held_out: float = 0.01
    """Share of the conversations, between 0 and 1, to evaluate the draft on and never train on. A
    hash chooses them, so every run holds out the same ones, with all answers to the same first
    question on one side.
    """
    num_prompts: int = 64
    """Number of held-out prompts for the forecast and the engine, in equal parts from every domain.
    """
    prompts: str | None = None
    """Conversations whose last questions are the held-out prompts, in the forms of --data.source,
    e.g. your evaluation set. By default the prompts are of the held-out conversations.
    """
    max_prompt_tokens: int = 1024
    """Longest held-out prompt, in tokens; longer ones are left out."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that write today's, such as Llama 3.2's. By default
    the day on which the run began. Runs that share a cache of the target need the same.
    """
    cache: Path | None = None
    """Folder of the tokenised data, for several runs to share; by default inside --output. Data,
    template, tokenizer or date that change are noticed, and tokenised again.
    """
    strict: bool = False
    """End the run at the first row that cannot be used, instead of skipping such rows with a count
    for each reason.
    """

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(
                f"--data.held-out is {self.held_out}: the share to evaluate on lies between 0 and 1"
            )
        if self.date is not None:
            choose_day(self.date, "--data.date")
        require_least(self, "data.", num_prompts=1)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Source of the target's distribution, which the draft learns to match."""

    kind: Literal["model", "cache", "endpoint"] = "model"
    """Source of the target's predictions. `model`: run the target in this process; exact.
    `endpoint`: ask the vLLM servers in --signal.url at each step, without loading the target
    here. `cache`: compute them once before training, here or on those servers, and read them
    from disk. From a server or a cache, a standalone draft gets the top k probabilities; a head
    gets hidden states, which give the exact distribution.
    """
    k: int = 32
    """Number of most probable tokens kept for each position, for a standalone draft with endpoint
    or cache. The rest of the probability becomes one bucket.
    """
    shard: bool = False
    """Share the layers of a target in these processes out over them (FSDP2), instead of a whole
    copy in each. Only the first process reads the files. Needs --prove.no-engine.
    """
    exact: bool = False
    """For a standalone draft with endpoint or cache: read hidden states, as a head does, which give
    the exact distribution. The servers are then those of `redraft serve-features`, and faster:
    without `prompt_logprobs`.
    """
    url: tuple[str, ...] = ()
    """Addresses of the target's vLLM servers, http://HOST:PORT. Each request goes to the least busy
    one, and a failed server is skipped until it is back. For a head, start them with `redraft
    serve-features`; for a standalone draft, with --max-logprobs of at least k.
    """
    storage: str = DEFAULT_STORAGE
    """Folder or fsspec URL from which hidden states are read, for a head with servers: the
    `--storage` of `redraft serve-features`. Nothing outside of it is read, whatever a server
    answers.
    """
    kept: str = ""
    """Folder or fsspec URL with the hidden states that `redraft regenerate --keep-states` has kept,
    for a head with servers. The servers compute only those of other texts.
    """
    cache: Path | None = None
    """Folder of the cache, for several runs to share; by default inside --output."""
    cache_dtype: HiddenDtype = "bfloat16"
    """Type of cached hidden states. bfloat16 is exact for a target in bfloat16. float8 takes half
    of the space: 8-bit floats with a scale for each state.
    """

    def __post_init__(self) -> None:
        require_least(self, "signal.", k=1)
        if self.kind == "endpoint" and not self.url:
            raise ValueError(
                "--signal.kind endpoint needs --signal.url, the address of the target's vLLM server"
            )
        if self.shard and self.url:
            raise ValueError(
                "--signal.shard is for a target in these processes: with --signal.url servers hold "
                "it"
            )
        if self.kept and not self.url:
            raise ValueError(
                "--signal.kept is read beside servers, which compute the states that it lacks: give "
                "--signal.url too"
            )
        if self.kind == "model" and self.exact:
            raise ValueError(
                "--signal.exact is for servers and caches: a target in this process is always exact"
            )
        if self.kind == "model" and self.url:
            raise ValueError(
                "--signal.url is not read with --signal.kind model: choose endpoint or cache"
            )


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Length and rhythm of training."""

    steps: int = 2000
    """Number of optimizer steps."""
    minutes: float | None = None
    """Length of training in minutes, instead of --loop.steps. The number of steps follows from the
    speed of the first ones; a resumed run keeps it. Evaluations and checkpoints are not counted.
    """
    epochs: float | None = None
    """Passes over the data, instead of --loop.steps."""
    batch_size: int = 8
    """Rows of --loop.sequence-length tokens per process and micro-batch."""
    sequence_length: int = 4096
    """Tokens per row. Train at the length you serve: a draft is poor beyond the positions it was
    trained on.
    """
    log_every: int = 10
    """Steps between two lines of metrics; the last step always has one."""
    eval_every: int = 200
    """Steps between two evaluations on held-out text (alpha and tau), and one at the end; 0 turns
    them off.
    """
    eval_batches: int = 8
    """Batches of held-out text per evaluation, the same ones each time."""
    save_every: int = 500
    """Steps between two checkpoints, and one at the end; 0 turns them off."""
    stop_by: Literal["steps", "acceptance"] = "steps"
    """`steps` trains all --loop.steps and exports the last one. `acceptance` ends as soon as the
    held-out tau has not risen for --loop.patience evaluations, and exports the draft of the best
    evaluation: acceptance may fall long before the loss on the training text rises. The learning
    rate follows --loop.steps in both cases.
    """
    patience: int = 3
    """Number of evaluations (--loop.eval-every) without a higher tau after which --loop.stop-by
    acceptance ends.
    """
    seed: int = 0
    """Random seed for data order and initial weights."""
    compile: bool = False
    """Compile the layers of the draft, and of a target that is whole in this process, with
    `torch.compile`: fewer and larger kernels between the matrix products. The first step and the
    first evaluation take a minute or two longer, and results differ in rounding. Needs a C++
    compiler; not for DeepSpeed.
    """

    def __post_init__(self) -> None:
        if self.compile:
            from redraft.distill.launch.compiled import (
                require_compiler,
            )  # here, because it imports torch

            require_compiler()
        require_least(
            self, "loop.", steps=1, batch_size=1, sequence_length=2, eval_batches=1, patience=1
        )
        require_least(self, "loop.", log_every=1, eval_every=0, save_every=0)
        for name, amount in (("minutes", self.minutes), ("epochs", self.epochs)):
            if amount is not None and not 0 < amount < math.inf:
                raise ValueError(f"--loop.{name} is {amount}: it must be above 0 and finite")
        if self.epochs is not None and self.minutes is not None:
            raise ValueError(
                "--loop.epochs and --loop.minutes both say how long to train: leave out one of them"
            )
        if self.stop_by == "acceptance" and not self.eval_every:
            raise ValueError(
                "--loop.stop-by acceptance needs evaluations: set --loop.eval-every above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Prove:
    """Evaluation of the trained draft: a forecast, then a real vLLM with and without it."""

    engine: bool = True
    """After training, serve the target in a real vLLM with the draft and without it, and compare
    their answers. Without this, the report holds only the forecast. `redraft bench` measures the
    speed.
    """
    ce_baseline: bool = False
    """Also train the same draft by plain cross-entropy on the text, for as many steps, to compare
    with. Doubles the training time; only `redraft train standalone` does it.
    """
    num_speculative_tokens: int = NUM_TOKENS
    """Draft tokens per step in held-out metrics, forecast and engine. A head cannot draft more than
    it was trained for.
    """
    max_tokens: int = 128
    """Longest answer to a held-out prompt, in tokens."""
    concurrency: int = 4
    """Number of requests in flight at once."""
    engine_args: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument for vLLM, after an equals sign: --prove.engine-args=--tensor-parallel-size=8. Once
    for each argument.
    """
    reference: Path | None = None
    """Folder for several runs to share results that depend only on the target and the prompts: the
    target's answers, and the engine's answers without a draft. By default, --output.
    """

    def __post_init__(self) -> None:
        require_least(self, "prove.", num_speculative_tokens=1, max_tokens=1, concurrency=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of every family."""

    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Model on your server, for the draft to speed up: a folder or a hub name."""
    target_dtype: TargetDtype | None = None
    """Type in which the target computes, here and in the engine of the proof. By default as stored
    on a GPU. On a CPU bfloat16 if it is stored so and the CPU has instructions for bfloat16,
    else float32, in which outputs with and without a draft are compared token for token.
    """
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=Divergence)
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/draft")
    """Folder of the run. It receives the config, metrics, checkpoints, the exported draft and the
    report.
    """
    overwrite: bool = False
    """Replace the run in --output. It is kept in --output/.previous until the new one is complete.
    Otherwise a run with the same settings, target and data continues from its newest checkpoint,
    and another is refused.
    """
    mixed_precision: Literal["no", "bf16"] | None = None
    """Precision of training; by default bf16 on a GPU with bfloat16 units, elsewhere as `accelerate
    config` says. bf16 keeps the weights in float32.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, by layer or (EAGLE, MTP) by draft step: slower,
    with far less memory. Not for Medusa."""
    wandb: str | None = None
    """Weights & Biases project to log to, or ENTITY/PROJECT; by default none. Without a login the
    log is kept offline.
    """


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TrainConfig, Generic[Options]):
    """Settings of a head."""

    head: Options
    start_from: Path | None = None
    """Continue training this head, a folder or a hub name, instead of a new one. It must be of the
    same family and target; the options in it replace those of --head.
    """
    init: str = ""
    """Initial weights; empty takes the first that the family has. `last_layer`, `last_layers`:
    copies of the target's last layers. `least_squares` (EAGLE-3): the best linear prediction of
    the target's next state, which drafts before the first step; it needs --head.fc-norm.
    `native` (MTP): the layer that the target ships. `random`: random weights. If the target is
    in shards or on servers, layers are read from its files.
    """
    init_tokens: int = 65536
    """Tokens that --init least_squares is fitted to: several times the hidden size times the number
    of target layers that are read. For a target of 8B the fit takes about 10 GB of the device's
    memory, before training.
    """
    draft_vocab_size: int = 0
    """Size of the head's vocabulary: the tokens most frequent as labels. A smaller vocabulary makes
    a draft step faster; 0 keeps all of the target's. For EAGLE-3, P-EAGLE, DFlash and DSpark.
    """
    layout: Literal["vllm", "speculators"] = "vllm"
    """Format of the exported checkpoint: vLLM's, or that of the library `speculators`. vLLM serves
    both. For EAGLE-3, P-EAGLE, DFlash and DSpark.
    """

    def __post_init__(self) -> None:
        require_least(self, init_tokens=1)


@dataclass(frozen=True, kw_only=True)
class StandaloneConfig(TrainConfig):
    """Settings of a standalone draft."""

    draft: Standalone


def make_config(family: Family) -> HeadConfig[Any] | StandaloneConfig:
    """The default config for a family.

    Raises:
        ValueError: the family cannot be trained.
    """
    row = family.training
    if row is None:
        raise ValueError(f"{family.title} is not trained")
    divergence, optim = (
        Divergence(name=row.divergence),
        Optim(name=row.optimizer, lr=row.lr, max_grad_norm=row.max_grad_norm),
    )
    loop = replace(Loop(), **row.loop)
    output = Path(f"outputs/{family.name.replace('_', '-')}")
    options = family.options_class()(**row.options)
    if not family.is_head:
        return StandaloneConfig(
            target=row.target,
            draft=options,
            divergence=divergence,
            optim=optim,
            loop=loop,
            output=output,
        )
    return HeadConfig(
        target=row.target,
        head=options,
        init=row.starts[0],
        draft_vocab_size=row.draft_vocab_size or 0,
        divergence=divergence,
        optim=optim,
        loop=loop,
        output=output,
    )
