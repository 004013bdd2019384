"""Count one training step of a draft at given sizes, with random weights or without weights."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from redraft.distill.loss.choice import Divergence
from redraft.distill.plan.choices import SignalKind
from redraft.distill.plan.held import (
    DRAFT_WEIGHTS,
    GRADIENTS,
    SIGNAL,
    STATE,
    TARGET_WEIGHTS,
)
from redraft.distill.plan.operations import Operation
from redraft.distill.plan.weightless import META, Count, Weightless
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.muon import Muon
from redraft.distill.train.objective import distill_loss
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import make_optimizers
from redraft.files.checkpoint import new_model
from redraft.heads.catalog import find_family
from redraft.heads.draft import Batch, ExactTarget, TargetSignal, TopKTarget
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.nn import prefix
from redraft.heads.target import Target

TARGET, DRAFT, LOSS, BACKWARD, OPTIMIZER = "target", "draft", "divergence", "backward", "optimizer"
"""The parts of a step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    family: str
    target: Any
    """The text config of the target."""
    whole: Any = None
    """The enclosing config, for a target that also reads images."""
    head: Any
    """The family's options, or the text config of a standalone draft."""
    draft_vocab_size: int = 0
    """Size of the draft's vocabulary. 0 for the target's whole vocabulary."""
    divergence: Divergence
    optimizer: Literal["adamw", "muon"] = "adamw"
    max_grad_norm: float = 1.0
    signal: SignalKind = "model"
    """Source of the signal: the target runs within the step, or sends hidden states (top-k
    probabilities for a standalone draft).
    """
    top_k: int = 32
    batch_size: int
    sequence_length: int
    documents: int = 1
    """Number of conversations per row."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of the target's weights. The draft's weights are in float32."""
    autocast: bool = True
    """Train in bfloat16."""
    keeps_gradients: bool = False
    """Whether gradients stay allocated between steps, as with several devices."""
    gradient_checkpointing: bool = False
    exact: bool = False
    """Whether a standalone draft receives hidden states instead of top-k probabilities."""

    def __post_init__(self) -> None:
        if not 1 <= self.documents <= self.sequence_length // 2:
            raise ValueError(
                f"{self.documents} documents do not fit into a row of {self.sequence_length} tokens: each "
                "needs 2 tokens"
            )
        if self.draft_vocab_size > self.target.vocab_size:
            raise ValueError(
                f"a draft vocabulary of {self.draft_vocab_size} is larger than the target's "
                f"{self.target.vocab_size}"
            )

    @property
    def tokens(self) -> int:
        return self.batch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class Counted:
    operations: Counter[Operation]
    memory: Counter[str]
    """Bytes by owner."""
    signal_bytes: int = 0
    """Number of bytes that the device receives from the target's servers or a cache."""


def count_step(
    plan: Plan,
    *,
    batch: Batch | None = None,
    signal: TargetSignal | None = None,
    weightless: bool = True,
    shown_on: torch.device = META,
) -> Counted:
    """Run one step and count its operations and memory.

    By default, `make_batch` makes `batch`, and `signal` comes from the source that the plan names.
    The code takes the branches for the device `shown_on`, which is a CPU or an accelerator.
    """
    torch.manual_seed(0)
    on_gpu = weightless and shown_on.type != "cpu"
    with _shown_on(shown_on), Count(weightless=weightless) as count, _merging(count, on_gpu):
        # With device=meta, `Count` gives weights no memory.
        with torch.device("meta") if weightless else nullcontext():
            model = _make_target(plan)
            draft = _make_draft(plan, model)
        batch = batch or make_batch(plan)
        if signal is None:
            source = make_source(plan, model, draft, batch, has_weights=not weightless)
            signal = None if plan.signal == "model" else source(batch)
        else:
            source = None
        trained = [p for p in draft.parameters() if p.requires_grad]
        optimizers = make_step_optimizers(plan, draft)
        count.memory.hold(TARGET_WEIGHTS, [*model.parameters(), *model.buffers()])
        count.memory.hold(DRAFT_WEIGHTS, [*draft.parameters(), *draft.buffers()])
        sent = [] if signal is None else signal.tensors()
        count.memory.hold(SIGNAL, sent)
        # An optimizer creates its state in its first step. This moment is not counted, because it
        # occurs once per training run.
        _make_state(optimizers, trained, count, keep=plan.keeps_gradients)
        count.memory.restart()
        run_parts(plan, draft, source, batch, signal, optimizers, count)
        count.begin("")
        return Counted(
            operations=count.operations,
            # Unary plus drops owners with 0 bytes.
            memory=+count.memory.peak,
            signal_bytes=sum(x.numel() * x.element_size() for x in sent),
        )


def count_target(plan: Plan) -> Counted:
    with Count(weightless=True) as count:
        with torch.device("meta"):
            model = _make_model(plan.whole or plan.target, plan.dtype)
        count.memory.hold(TARGET_WEIGHTS, [*model.parameters(), *model.buffers()])
        count.memory.restart()
        count.begin(TARGET)
        InProcessTarget(model, has_weights=False)(make_batch(plan))
        return Counted(operations=count.operations, memory=+count.memory.peak)


def count_flops(counted: Counted) -> int:
    return sum(work.flops * times for work, times in counted.operations.items())


def make_models(plan: Plan, device: torch.device) -> tuple[Any, Any]:
    """Create a plan's (target, draft) on a device, with random weights."""
    with device:
        model = _make_target(plan)
        # The ids of a reduced vocabulary are created on the CPU here too.
        return model, _make_draft(plan, model).to(device)


class Marker(Protocol):
    """Function called when a part of a step begins."""

    def begin(self, part: str) -> None: ...


def run_parts(
    plan: Plan,
    draft: Any,
    source: Any,
    batch: Batch,
    signal: TargetSignal | None,
    optimizers: list[torch.optim.Optimizer],
    count: Marker,
    device_type: str = "cpu",
) -> None:
    """Run the step of `distill.train.step`, part by part.

    Autocast treats weightless tensors as CPU tensors.
    """
    scale = 1 / int(batch.loss_mask_BT.sum())
    if signal is None:
        count.begin(TARGET)
        signal = source(batch)
    with torch.autocast(device_type, torch.bfloat16) if plan.autocast else nullcontext():
        count.begin(DRAFT)
        steps = draft.draft_steps(batch, signal)
        count.begin(LOSS)
        loss = distill_loss(steps, batch, signal, plan.divergence, scale).loss
    # The graph keeps the tensors that it needs from these. The signal stays in memory, as in
    # `Distillation.step`.
    del steps
    count.begin(BACKWARD)
    torch.autograd.backward(loss)
    count.begin(OPTIMIZER)
    _update(optimizers, plan.max_grad_norm)


def _update(optimizers: list[torch.optim.Optimizer], max_grad_norm: float) -> None:
    trained = [
        p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    with _shown_on(torch.device("cpu")):
        nn.utils.clip_grad_norm_(
            trained, max_grad_norm, foreach=True
        )  # the default for tensors that have memory
    _take_step(optimizers)


def _take_step(optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        # AdamW does not accept an unknown device. Muon checks whether the device computes in
        # bfloat16.
        shown_on = Weightless.shown_on if isinstance(optimizer, Muon) else torch.device("cpu")
        with _shown_on(shown_on):
            optimizer.step()


def make_step_optimizers(plan: Plan, draft: Any) -> list[torch.optim.Optimizer]:
    with _shown_on(torch.device("cpu")):  # as in `_take_step`
        return make_optimizers(draft, Optim(name=plan.optimizer))


def _make_state(
    optimizers: list[torch.optim.Optimizer], trained: list[Tensor], count: Count, *, keep: bool
) -> None:
    """Give the optimizers the state that they have in the middle of a training run.

    With `keep`, the gradients stay, as they do between steps on several devices.
    """
    for p in trained:
        p.grad = torch.zeros_like(p)
    _take_step(optimizers)
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    count.memory.hold(STATE, [x for state in states for x in state.values()])
    if keep:
        count.memory.hold(GRADIENTS, [cast(Tensor, p.grad) for p in trained])
        return
    for p in trained:
        p.grad = None
        # The backward pass produces gradients one parameter after another, so each is counted as it
        # arrives.
        p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: count.memory.hold(GRADIENTS, [cast(Tensor, p.grad)])
        )


# ---------------------------------------------------------------------------------------------
# models, batch and signal


@contextmanager
def _shown_on(device: torch.device) -> Iterator[None]:
    before, Weightless.shown_on = Weightless.shown_on, device
    try:
        yield
    finally:
        Weightless.shown_on = before


@contextmanager
def _merging(count: Count, on_gpu: bool) -> Iterator[None]:
    """Count each function that is always compiled on a GPU as one kernel."""
    before = prefix.as_kernel
    if on_gpu:
        prefix.as_kernel = lambda function, _: count.whole(function)  # type: ignore[assignment]
    try:
        yield
    finally:
        prefix.as_kernel = before


def _make_model(config: Any, dtype: torch.dtype) -> Any:
    text = config.get_text_config()
    if getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None):
        # This sorts rows by expert, as on GPUs. It is the only implementation whose sizes do not
        # depend on the router's choices.
        text._experts_implementation = "grouped_mm"
    return new_model(config, dtype).eval().requires_grad_(False)


def _make_target(plan: Plan) -> Any:
    """Create the target, or only its embeddings and output head if it runs elsewhere.

    A trainer loads no other weights of such a target.
    """
    if plan.signal == "model":
        return _make_model(plan.whole or plan.target, plan.dtype)
    return _Borrowed(plan.target, plan.dtype)


class _Borrowed(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def _make_draft(plan: Plan, model: Any) -> Any:
    family = find_family(plan.family)
    draft: Any
    if family.is_head:
        target = replace(Target.from_model(model), config=plan.target)
        draft = family.sketch(plan.head, target, plan.draft_vocab_size)
    else:
        draft = StandaloneDraft(new_model(plan.head, torch.float32))
    if plan.gradient_checkpointing:
        draft.recomputes = True
    return draft.train()


def make_batch(plan: Plan) -> Batch:
    """Create rows of equally long documents, with every token a label."""
    length = plan.sequence_length // plan.documents
    seeded = torch.Generator().manual_seed(
        0
    )  # initial weights, if any, are drawn from the shared generator
    ids_BT = torch.randint(
        plan.target.vocab_size, (plan.batch_size, plan.sequence_length), generator=seeded
    )
    rows = [
        [(ids_T, torch.ones_like(ids_T, dtype=torch.bool)) for ids_T in torch.split(ids_T, length)]
        for ids_T in ids_BT
    ]
    return Batch.packed(rows, width=plan.sequence_length)


def make_source(plan: Plan, model: Any, draft: Any, batch: Batch, *, has_weights: bool) -> Any:
    if plan.signal == "model":
        return InProcessTarget(model, draft.aux_layer_ids, has_weights=has_weights)
    return lambda batch: _receive(plan, model, draft, batch)


def _receive(plan: Plan, model: Any, draft: Any, batch: Batch) -> TargetSignal:
    """Create a signal like those that servers or a cache provide."""
    shape = batch.input_ids_BT.shape
    if not (find_family(plan.family).is_head or plan.exact):
        ids_BTK = torch.arange(plan.top_k).expand(*shape, -1).contiguous()
        log_probs_BTK = torch.full(ids_BTK.shape, -4.0)
        return TargetSignal(distribution=TopKTarget(ids_BTK=ids_BTK, log_probs_BTK=log_probs_BTK))
    hidden, layers = plan.target.hidden_size, len(draft.aux_layer_ids)
    exact = ExactTarget(
        hidden_BTD=torch.randn(*shape, hidden, dtype=plan.dtype),
        head_VD=model.get_output_embeddings().weight.detach(),
    )
    aux_BTLD = torch.randn(*shape, layers, hidden, dtype=plan.dtype) if layers else None
    return TargetSignal(distribution=exact, aux_BTLD=aux_BTLD)
