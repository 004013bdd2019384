"""Create the initial draft, with the weights that `--init` selects or from an earlier draft.

D = hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast
from torch import Tensor, nn

from redraft.distill.data.vocabulary import choose_size, frequent_ids
from redraft.distill.run.inputs import live_signal
from redraft.distill.signal.parts import (
    is_whole,
    last_layers,
    read_last_layers,
    read_stream_norms,
    stream_scales,
)
from redraft.distill.signal.transfer import to_device
from redraft.distill.train.run_config import HeadConfig, StandaloneConfig, check_num_tokens
from redraft.files.checkpoint import require_finite
from redraft.files.progress import Progress
from redraft.files.windows import target_window
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.families.eagle3_start import start_by_least_squares
from redraft.heads.families.standalone import make_draft
from redraft.heads.nn.causal_lm import final_norm
from redraft.heads.nn.masks import choose_mask_token
from redraft.heads.provenance import read_provenance

if TYPE_CHECKING:
    from redraft.distill.run.training_run import Run


def start(run: Run, cfg: HeadConfig[Any] | StandaloneConfig | None = None) -> Any:
    """Return a run's untrained draft, or the draft to continue, which is the same on every rank.

    `cfg`, if given, replaces the settings of the run. If a checkpoint will replace the weights of
    an untrained head, they are random.

    Raises:
        ValueError: the target does not provide what this start needs.
    """
    cfg = cfg or run.cfg
    if isinstance(cfg, StandaloneConfig):
        _say(run, f"the draft starts from {cfg.draft}")
        draft = make_draft(cfg.draft, run.target.model, run.target.files.tokenizer, cfg.loop.seed)
        require_finite(draft, f"the draft {cfg.draft.checkpoint or ''}".strip())
        return draft
    if cfg.start_from is not None:
        return _continue(run, cfg)
    if cfg.init == "native":
        return _load_native(run, cfg)
    head = _make_untrained(run, cfg)
    if run.has_passed(cfg):
        _say(run, "the head continues from the checkpoint, so its start is not computed again")
        return head
    match cfg.init:
        case "last_layer" | "last_layers":
            _start_as_layers(run, head, getattr(cfg.head, "num_layers", 1))
        case "least_squares":
            _start_by_least_squares(run, head, cfg.init_tokens)
        case _:
            _say(run, "the head starts from random weights")
    return head


def _make_untrained(run: Run, cfg: HeadConfig[Any]) -> Any:
    options, vocabulary, target = cfg.head, list[Tensor | None](), run.target
    if getattr(options, "mask_token_id", 0) is None:  # only parallel drafters have a mask token
        options = replace(
            options, mask_token_id=choose_mask_token(target.files, len(target.borrowed.embed_VD))
        )
    reach = target_window(run.shape)
    if reach is not None and getattr(options, "window", 0) is None:
        # vLLM always applies the target's window to layers without one, so the export should state
        # it.
        options = replace(options, window=reach)
        _say(run, f"the head has the window of the target's layers, {reach} positions")
    if run.family.training and (usual := run.family.training.draft_vocab_size) is not None:
        # Count only on the training part, because held-out text must not choose the vocabulary with
        # which it is evaluated.
        all_ids = run.shape.vocab_size
        size = choose_size(cfg.draft_vocab_size, usual, all_ids)
        vocabulary.append(frequent_ids(run.data.train.samples, size, all_ids))
    return run.family.draft_class()(options, target.borrowed, *vocabulary)


def _continue(run: Run, cfg: HeadConfig[Any]) -> Any:
    """Load the head given by `--start-from`, with the options of its own training run."""
    assert cfg.start_from is not None
    trained_for = read_provenance(cfg.start_from).target_fingerprint
    head = run.load(cfg.start_from, has_moved=trained_for not in ("", run.target.files.fingerprint))
    # Only now are its options known.
    check_num_tokens(cfg.prove.num_speculative_tokens, head.config.num_tokens)
    require_finite(head, f"the head {cfg.start_from}")
    return head


def _load_native(run: Run, cfg: HeadConfig[Any]) -> Any:
    """Load the MTP layer from the target's weights, with the options of this run."""
    head = run.family.draft_class().load(run.target.source.folder, run.target.borrowed)
    head.config = cfg.head
    return head


def _start_as_layers(run: Run, head: Any, count: int) -> None:
    """Initialise a head with the weights of the target's last `count` layers.

    If this process does not have these weights, the main process reads them from the target's files
    and shares the head. If it cannot, the head keeps its random weights, and a printed line gives
    the reason.
    """
    layers = f"the last {'layer' if count == 1 else f'{count} layers'} of {run.target.source.name}"
    if is_whole(run.target.model):
        head.init_from_layers(*last_layers(run.target.model, count))
        _say(run, f"the head starts from {layers}")
        return
    read = functools.partial(read_last_layers, run.target.source, run.target.model.dtype, count)
    try:
        run.folder.on_main(lambda: head.init_from_layers(*read()))
    except (ValueError, OSError) as error:
        _say(run, f"the head starts from random weights: {error}")
    else:
        share(run, head)
        _say(
            run,
            f"the head starts from {layers}, read from its files, because this process does not "
            "have them",
        )


def _start_by_least_squares(run: Run, head: Any, num_tokens: int) -> None:
    scales = read_scales(run, head.aux_layer_ids)
    _say(run, f"the head starts from a least-squares fit on up to {num_tokens:,} tokens")
    # Keep only the final norm, because everything else except the output head is replaced.
    head.init_from_layers([nn.Module()], final_norm(run.target.model))
    head.to(run.accelerator.device)
    start_by_least_squares(head, read_last_signals(run, head.aux_layer_ids, num_tokens), scales)
    # Each rank has solved the equations itself, and the signs may differ between hardware.
    share(run, head)


def share(run: Run, head: Any) -> None:
    """Copy the main process's weights of a head to every rank. All ranks must call this."""
    head.to(run.accelerator.device)
    broadcast([parameter.data for parameter in head.parameters()])
    head.cpu()


def read_scales(run: Run, layer_ids: Sequence[int]) -> list[Tensor]:
    """Return the factors of the norm that reads each stream (the states after k layers), [D].

    Raises:
        ValueError: a stream is not read by an RMS norm, or the target's final norm is of a
            different kind.
    """
    name, model = run.cfg.target, run.target.model
    if is_whole(model):
        return stream_scales(model, layer_ids, name)
    read = functools.partial(read_stream_norms, run.target.source, model.dtype, layer_ids)
    return run.folder.on_main(lambda: stream_scales(read(), layer_ids, name))


def read_last_signals(
    run: Run, layer_ids: Sequence[int], num_tokens: int
) -> list[tuple[Batch, TargetSignal]]:
    """Return the last batches of the first epoch, with the target's states.

    The batches have `num_tokens` tokens in total, or all tokens if there are fewer. The last
    batches are used because training reaches them late, and a head learns little from text that
    its start was fitted to. All ranks get the same batches.
    """
    source = live_signal(run.cfg.signal, run.target, layer_ids)
    train, size = run.data.train, run.cfg.loop.batch_size
    total = train.num_batches(size)
    first = max(0, total - math.ceil(num_tokens / (size * train.sequence_length)))
    bar = Progress(
        range(first, total),
        desc="states to start from",
        unit="batch",
        disable=not run.accelerator.is_main_process,
    )
    batches = (
        to_device(train.batch(number, batch_size=size), run.accelerator.device) for number in bar
    )
    return [(batch, source(batch)) for batch in batches]


def _say(run: Run, line: str) -> None:
    if run.accelerator.is_main_process:
        print(line)
