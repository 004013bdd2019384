"""Checks of the numbers in a checkpoint: every one finite, no matrix of zeros, no copy of the target."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.families.mtp_layouts import detect_layout
from redraft.heads.files.tensors import list_tensors, read_tensors

QUANTIZED = {"F8_E4M3", "F8_E5M2", "U8", "I8"}  # packed: values say nothing without scales


def numbers(pair: Pair) -> Iterator[Finding]:
    """Every value is finite, and no matrix is all zeros. Zero biases and zero-centred norms are usual."""
    for name in draft_tensors(pair):
        # F64, F32, F16, BF16. Not BOOL (t2d), which begins with B as well.
        if pair.dtypes[name] in QUANTIZED or not pair.dtypes[name].startswith(("F", "BF")):
            continue
        tensor = read_tensors(pair.draft, [name])[name]
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            yield Finding(
                f"{name} holds {wrong} values that are not finite (NaN or infinity): the draft proposes nothing useful",
                "export the draft again in bfloat16: float16 ends at 65,504"
                if pair.dtypes[name] == "F16"
                else "export an earlier checkpoint: training diverged, or the file was damaged",
            )
        elif tensor.ndim > 1 and not bool(tensor.any()):
            yield Finding(
                f"{name} is all zeros: it was never trained, or was lost in a conversion",
                "export the draft again from its training, or train it",
            )


def draft_tensors(pair: Pair) -> list[str]:
    """The tensors of the draft; in a folder that also holds its target, only its own."""
    if not (pair.is_own_target and pair.family.is_in_target):
        return list(pair.shapes)
    prefix = detect_layout(pair.target_config).prefix.format(n=pair.target_config.num_hidden_layers)
    return [name for name in pair.shapes if name.startswith(prefix)]


def copy_of_target(pair: Pair) -> Iterator[Finding]:
    """A standalone draft is another model than its target."""
    files = {folder: list_tensors(folder) for folder in (pair.draft, pair.target.folder)}
    if files[pair.draft].keys() != files[pair.target.folder].keys():
        return
    # layers first: in any other model the first of them differs, and `all` reads no more
    equal = (_is_same(pair, name) for name in sorted(files[pair.draft], key=lambda name: ".layers." not in name))
    if all(equal):
        yield Finding(
            "the draft is the target itself, tensor by tensor: every token is accepted, and nothing becomes faster",
            "give a smaller draft (--draft): `redraft train standalone` makes one from some layers of the target",
        )


def _is_same(pair: Pair, name: str) -> bool:
    mine, its = (read_tensors(folder, [name])[name] for folder in (pair.draft, pair.target.folder))
    return mine.shape == its.shape and torch.equal(_narrow(mine), _narrow(its))


def _narrow(tensor: Tensor) -> Tensor:
    # A copy may be stored in another type: compare after rounding.
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
