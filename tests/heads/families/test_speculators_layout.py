"""The speculators package itself loads our export, and its training pass computes our draft steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import VOCAB, make_batch, make_ids, make_random, make_signal, make_target
from safetensors.torch import load_file
from torch import Tensor

from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target

speculators = pytest.importorskip(
    "speculators", reason="pip install speculators==0.9.0 to compare with it"
)

VARIANTS: dict[str, tuple[dict[str, Any], Tensor | None]] = {
    "plain": ({}, None),
    "reduced vocabulary": ({"norm_before_residual": True}, torch.arange(3, VOCAB, 4)),
    "3.1": (
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        torch.arange(3, VOCAB, 4),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_loads_the_export_and_computes_the_same_steps(
    variant: str, tmp_path: Path
) -> None:
    options, draft_ids = VARIANTS[variant]
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    head = make_random(
        Eagle3(
            Config(aux_layer_ids=(1, 2, 4), num_steps=3, **options),
            Target.from_model(model),
            draft_ids,
        )
    )
    head.export(tmp_path / "draft", layout="speculators", target_name=str(tmp_path / "target"))
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "draft"))
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in tensors.items())

    batch = make_batch([[make_ids(20)]])
    signal = make_signal(model, batch, head.aux_layer_ids)
    steps = head.draft_steps(batch, signal)
    for step, logits_TW in zip(
        steps, training_logits(theirs, batch.input_ids_BT, signal.aux_BTLD), strict=True
    ):
        ours_TW = step.hidden_BTD[0] @ step.head_WD.T
        rows_T = step.mask_BT[0]
        torch.testing.assert_close(ours_TW[rows_T], logits_TW[rows_T], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def training_logits(theirs: Any, input_ids_BT: Tensor, aux_BTLD: Tensor) -> list[Tensor]:
    """The draft's logits of three steps of the package's training pass, each [T, W]."""
    from speculators.models.attention import create_float_mask

    # its default is flex attention, which wants a compiler
    theirs._attn_impl, theirs._create_mask_fn = "eager", create_float_mask
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "eager"
    logits: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
    # its data pipeline hands over tokens that are one ahead of the features
    theirs(
        aux_BTLD.flatten(2), input_ids_BT.roll(-1, 1), torch.zeros_like(input_ids_BT), ttt_steps=3
    )
    return logits
