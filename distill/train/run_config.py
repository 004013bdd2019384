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
from redraft.files.setting_error import require_least
from redraft.heads.family import NUM_TOKENS, Family
from redraft.heads.options import Standalone

Options = TypeVar("Options")

MAX_DRAFT_TOKENS = 128  # limit of vLLM's rejection sampler, per request and step


def check_num_tokens(num_speculative_tokens: int, num_steps: int) -> None:
    """Raise ValueError if draft tokens exceed the head's draft steps, or the steps vLLM's limit."""
    if num_steps > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"the head has {num_steps} draft steps, but vLLM verifies at most {MAX_DRAFT_TOKENS} draft "
            "tokens"
        )
    if not 1 <= num_speculative_tokens <= num_steps:
        raise ValueError(
            f"{num_speculative_tokens} draft tokens requested, but the head is trained for {num_steps}: lower "
            "--prove.num-speculative-tokens or train the head for more"
        )


@dataclass(frozen=True, kw_only=True)
class Data:
    """Text to train on, and held-out text to evaluate on."""

    source: str = "HuggingFaceH4/ultrachat_200k"
    """Training conversations: a hub name, a .jsonl, .json or .parquet file (the first two also as
    .gz or .zst), a folder of such files or text files, or `stdlib` (code and prose from the Python
    installation). Drafts learn best from the target's own answers: see `redraft regenerate`.
    """
    split: str = "train_sft"
    """Split of the data set."""
    held_out: float = 0.01
    """Fraction of the conversations, between 0 and 1, that is held out to evaluate the draft. The
    choice is by hash, so every run holds out the same conversations, and all answers to the same
    first question are on the same side.
    """
    num_prompts: int = 64
    """Number of held-out prompts for the forecast and the engine, divided equally between domains.
    """
    prompts: str | None = None
    """Conversations whose last questions become the held-out prompts, in the formats of
    --data.source, e.g. your evaluation set. By default, prompts come from the held-out
    conversations.
    """
    max_prompt_tokens: int = 1024
    """Maximum length of a held-out prompt in tokens. Longer prompts are skipped."""
    date: str | None = None
    """Date, as YYYY-MM-DD, for chat templates that contain today's date, such as Llama 3.2's.
    Default: the day on which the run started. Runs that share a cache of the target must use the
    same date.
    """
    cache: Path | None = None
    """Folder for the tokenised data, which several runs can share. Default: inside --output. If
    data, template, tokenizer or date change, the data is tokenised again.
    """
    strict: bool = False
    """Stop at the first row that cannot be used. By default, such rows are skipped and counted by
    reason.
    """
    cut_answers: bool = False
    """Fill a row with the beginning of an answer that does not fit. By default, a conversation ends
    after its last answer that fits.
    """

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"--data.held-out is {self.held_out}: it must be above 0 and below 1")
        if self.date is not None:
            choose_day(self.date, "--data.date")
        require_least(self, num_prompts=1)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Source of the target's distribution, which the draft learns to match."""

    kind: Literal["model", "cache", "endpoint"] = "model"
    """Source of the target's predictions. `model`: run the target in this process (exact).
    `endpoint`: query the vLLM servers in --signal.url in each step; the target is not loaded here.
    `cache`: compute the predictions once before training, here or on those servers, and read them
    from disk. With a server or a cache, a standalone draft receives the top-k probabilities; a head
    receives hidden states, which give the exact distribution.
    """
    k: int = 32
    """Number of most probable tokens kept per position, for a standalone draft with endpoint or
    cache. The remaining probability is one bucket.
    """
    shard: bool = False
    """Shard the target's layers over the processes (FSDP2) instead of loading a full copy in each.
    Only the first process reads the files. Needs --prove.no-engine.
    """
    exact: bool = False
    """Use hidden states for a standalone draft with endpoint or cache. They give the exact
    distribution. The servers must be started with `redraft serve-features`. They are faster because
    they do not compute `prompt_logprobs`.
    """
    url: tuple[str, ...] = ()
    """Addresses of the target's vLLM servers, `http://HOST:PORT`. Each request goes to the least
    busy server, and a failed server is skipped until it recovers. For a head, start the servers
    with `redraft serve-features`; for a standalone draft, with --max-logprobs of at least k.
    """
    storage: str = DEFAULT_STORAGE
    """Folder or fsspec URL from which hidden states are read, for a head with servers. It must
    equal the `--storage` of `redraft serve-features`. Paths outside it are never read, whatever a
    server returns.
    """
    kept: str = ""
    """Folder or fsspec URL with hidden states stored by `redraft regenerate --keep-states`, for a
    head with servers. The servers compute only the states of other texts.
    """
    cache: Path | None = None
    """Folder of the cache, which several runs can share. Default: inside --output."""
    cache_dtype: HiddenDtype = "bfloat16"
    """Format of cached hidden states. bfloat16 is exact for a target in bfloat16. float8 (8-bit
    floats with a scale per state) halves the size.
    """

    def __post_init__(self) -> None:
        require_least(self, k=1)
        if self.kind == "endpoint" and not self.url:
            raise ValueError(
                "--signal.kind endpoint needs --signal.url, the address of the target's vLLM server"
            )
        if self.shard and self.url:
            raise ValueError(
                "--signal.shard shards a target in these processes, but with --signal.url, "
                "servers run the target: remove one of them"
            )
        if self.kept and not self.url:
            raise ValueError(
                "--signal.kept needs servers that compute missing states: set --signal.url too"
            )
        if self.kind == "model" and self.exact:
            raise ValueError(
                "--signal.exact applies to servers and caches: a target in this process is always exact"
            )
        if self.kind == "model" and self.url:
            raise ValueError(
                "--signal.url has no effect with --signal.kind model: choose endpoint or cache"
            )


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Length of training, and the intervals of logs, evaluations and checkpoints."""

    steps: int = 2000
    """Number of optimizer steps."""
    minutes: float | None = None
    """Training time in minutes, instead of --loop.steps. The number of steps is derived from the
    speed of the first steps, and a resumed run keeps it. Evaluations and checkpoints are not
    counted.
    """
    epochs: float | None = None
    """Number of passes over the data, instead of --loop.steps."""
    batch_size: int = 8
    """Number of rows per process and micro-batch, each with --loop.sequence-length tokens."""
    sequence_length: int = 4096
    """Number of tokens per row, at most the target's maximum context length. Train at the context
    length at which you serve, because acceptance is low beyond the length that a draft was trained on.
    A longer conversation is truncated after the last answer that fits.
    """
    context_parallel: int = 1
    """Number of processes that share each row. Every process computes an equal part of its tokens,
    and attention gathers the keys of the others. Use it for rows of 32k tokens and more. Twice this
    number must divide --loop.sequence-length. P-EAGLE and standalone drafts do not support it, nor
    do servers: use --signal.kind model or cache.
    """
    log_every: int = 10
    """Number of steps between logged metrics. The last step is always logged."""
    eval_every: int = 200
    """Number of steps between evaluations on held-out text (alpha and tau). There is also one at
    the end. 0 disables them.
    """
    eval_batches: int = 8
    """Number of held-out batches per evaluation. They are always the same."""
    save_every: int = 500
    """Number of steps between checkpoints. There is also one at the end. 0 disables them."""
    stop_by: Literal["steps", "acceptance"] = "steps"
    """When to stop. `steps` trains for --loop.steps and exports the last draft. `acceptance` stops
    when the held-out tau has not risen for --loop.patience evaluations, and exports the draft of
    the best evaluation. Acceptance may fall long before the training loss rises. The learning rate
    follows --loop.steps in both cases.
    """
    patience: int = 3
    """Number of evaluations (--loop.eval-every) without a higher tau before --loop.stop-by
    acceptance stops the training.
    """
    seed: int = 0
    """Random seed for data order and initial weights."""
    compile: bool = False
    """Compile the draft's layers with `torch.compile`, and the target's layers if this process
    holds the whole target. This fuses the operations between matrix products. The first step and
    the first evaluation take one or two minutes longer, and results differ by rounding. It needs a
    C++ compiler, and is not available with DeepSpeed.
    """

    def __post_init__(self) -> None:
        if self.compile:
            from redraft.distill.launch.compiled import (
                require_compiler,
            )  # imported here, because it imports torch

            require_compiler()
        require_least(self, steps=1, batch_size=1, sequence_length=2, eval_batches=1, patience=1)
        require_least(self, log_every=1, eval_every=0, save_every=0, context_parallel=1)
        for name, amount in (("minutes", self.minutes), ("epochs", self.epochs)):
            if amount is not None and not 0 < amount < math.inf:
                raise ValueError(f"--loop.{name} is {amount}: it must be above 0 and finite")
        if self.epochs is not None and self.minutes is not None:
            raise ValueError(
                "--loop.epochs and --loop.minutes both set the training length: remove one of them"
            )
        if self.stop_by == "acceptance" and not self.eval_every:
            raise ValueError(
                "--loop.stop-by acceptance needs evaluations: set --loop.eval-every above 0"
            )


@dataclass(frozen=True, kw_only=True)
class Prove:
    """Evaluation of the trained draft: a forecast, then a real vLLM with and without it."""

    engine: bool = True
    """Compare vLLM's answers with and without the draft after training. With --prove.no-engine, the
    report contains only the forecast. `redraft bench` measures speed.
    """
    num_speculative_tokens: int = NUM_TOKENS
    """Number of draft tokens per step in held-out metrics, forecast and engine. A head cannot draft
    more tokens than it was trained for.
    """
    max_tokens: int = 128
    """Maximum length of an answer to a held-out prompt, in tokens."""
    concurrency: int = 4
    """Number of concurrent requests."""
    engine_args: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument for vLLM, after an equals sign: --prove.engine-args=--tensor-parallel-size=8. Repeat
    the flag for each argument.
    """
    reference: Path | None = None
    """Folder in which several runs share results that depend only on target and prompts: the
    target's answers, and the engine's answers without a draft. Default: --output.
    """

    def __post_init__(self) -> None:
        require_least(self, num_speculative_tokens=1, max_tokens=1, concurrency=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of every family."""

    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Target model that the draft will speed up: a folder or a hub name."""
    target_dtype: TargetDtype | None = None
    """Dtype of the target, here and in vLLM. Default on a GPU: the checkpoint's dtype. Default on a
    CPU: bfloat16 if the checkpoint uses it and the CPU has bfloat16 instructions, otherwise
    float32. In float32, outputs with and without a draft are compared token for token.
    """
    data: Data = field(default_factory=Data)
    signal: Signal = field(default_factory=Signal)
    divergence: Divergence = field(default_factory=Divergence)
    optim: Optim = field(default_factory=Optim)
    loop: Loop = field(default_factory=Loop)
    prove: Prove = field(default_factory=Prove)
    output: Path = Path("outputs/draft")
    """Output folder of the run: config, metrics, checkpoints, exported draft and report."""
    overwrite: bool = False
    """Replace the run in --output. The old run is kept in --output/.previous until the new one is
    complete. Without this flag, a run with the same settings, target and data resumes from its
    newest checkpoint, and a different run is refused.
    """
    mixed_precision: Literal["no", "bf16"] | None = None
    """Mixed precision for training. Default: bf16 on a GPU with bfloat16 units, otherwise the
    setting of `accelerate config`. With bf16, the weights stay in float32.
    """
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, per layer or (EAGLE, MTP) per draft step. This is
    slower but needs far less memory. It is not available for Medusa.
    """
    wandb: str | None = None
    """Weights & Biases project to log to, or ENTITY/PROJECT. Off by default. Without a login, the
    log is kept offline.
    """

    def __post_init__(self) -> None:
        # The training processes occupy the GPU memory until they exit.
        if self.signal.shard and self.prove.engine:
            raise ValueError(
                "a sharded target leaves no memory for vLLM: add --prove.no-engine, and run redraft "
                "eval afterwards"
            )


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TrainConfig, Generic[Options]):
    """Settings of a head."""

    head: Options
    start_from: Path | None = None
    """Continue training this head (a folder or hub name) instead of a new one. It must have the
    same family and target. Its options replace the --head options.
    """
    init: str = ""
    """Initial weights. Default: the first kind that the family supports. `last_layer`,
    `last_layers`: copy the target's last layers. `least_squares` (EAGLE-3): the best linear
    prediction of the target's next state, which makes useful proposals before the first step. It
    needs --head.fc-norm. `native` (MTP): the target's own layer. `random`: random weights. If the
    target is sharded or on servers, the layers are read from its files.
    """
    init_tokens: int = 65536
    """Number of tokens for the fit of --init least_squares: several times the hidden size times the
    number of target layers read. For an 8B target, the fit takes about 10 GB of device memory
    before training.
    """
    draft_vocab_size: int | None = None
    """Size of the head's vocabulary: the number of most frequent labels to keep. A smaller
    vocabulary makes draft steps faster. 0 keeps the target's whole vocabulary. Default: 32,000, or
    the target's whole vocabulary if that is smaller. For EAGLE-3, P-EAGLE, DFlash and DSpark.
    """
    layout: Literal["vllm", "speculators"] = "vllm"
    """Format of the exported checkpoint: vLLM's or that of the library `speculators`. vLLM loads
    both. For EAGLE-3, P-EAGLE, DFlash and DSpark.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_least(self, init_tokens=1)
        if self.start_from is None:
            options: Any = self.head
            check_num_tokens(self.prove.num_speculative_tokens, options.num_tokens)


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
        divergence=divergence,
        optim=optim,
        loop=loop,
        output=output,
    )
