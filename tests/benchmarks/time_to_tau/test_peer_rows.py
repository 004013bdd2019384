"""What speculators' trainer is fed: its own loss on it is the loss of our steps.

The feed goes through its own collate function and its own shift.

B = batch, T = tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_heads import VOCAB, make_batch, make_ids, make_random, make_signal, make_target

from benchmarks.time_to_tau.peers import PEERS, list_documents, split_documents, take_offline
from redraft.heads.draft import ExactTarget
from redraft.heads.families.eagle3 import Config, Eagle3
from redraft.heads.target import Target

speculators = pytest.importorskip(
    "speculators", reason="pip install speculators==0.9.0 to compare with it"
)
AUX = (1, 2, 4)


def test_speculators_computes_the_divergence_of_our_first_step_on_its_rows(tmp_path: Path) -> None:
    from speculators.losses import resolve_loss_config
    from speculators.models.attention import create_float_mask
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    model = make_target()
    model.save_pretrained(tmp_path / "target")
    target = Target.from_model(model)
    head = make_random(
        Eagle3(Config(aux_layer_ids=AUX, num_steps=1, norm_before_residual=True), target)
    )
    head.export(tmp_path / "draft", layout="speculators", target_name=str(tmp_path / "target"))
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "draft"))
    theirs._attn_impl, theirs._create_mask_fn = "eager", create_float_mask
    for layer in theirs.layers:
        layer.self_attn.config._attn_implementation = "eager"

    batch = make_batch([[make_ids(9), make_ids(7, seed=2)], [make_ids(14, seed=3)]])
    last = model.config.num_hidden_layers
    samples = list(split_documents(batch, make_signal(model, batch, (*AUX, last))))
    assert [len(sample["input_ids"]) for sample in samples] == [9, 7, 14]
    collate = CollateFn(32, model.config.hidden_size, len(AUX), torch.float32, shift_batch)
    fed = {name: value for name, value in collate(samples).items() if name != "error_records"}
    with torch.no_grad():
        _, loss, _ = theirs(**fed, ttt_steps=1, loss_config=resolve_loss_config("kl_div", "eager"))

    signal = make_signal(model, batch, AUX)
    (step,) = head.draft_steps(batch, signal)
    # Row t learns the target's row t + 1. All rows but the last of a document have one.
    has_next_BT = torch.zeros_like(batch.loss_mask_BT)
    has_next_BT[:, :-1] = (batch.document_BT[:, 1:] == batch.document_BT[:, :-1]) & (
        batch.document_BT[:, 1:] >= 0
    )
    rows_N = has_next_BT.flatten().nonzero().squeeze(-1)
    log_p = signal.distribution.logits(rows_N + 1).double().log_softmax(-1)
    log_q = step.logits(rows_N).double().log_softmax(-1)
    assert log_p.shape == (8 + 6 + 13, VOCAB)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_missing_package_is_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install .* --peers FOLDER"):
        PEERS["speculators"].require("eagle3", tmp_path)
    (tmp_path / "speculators").mkdir()
    (tmp_path / "speculators" / "__init__.py").touch()
    PEERS["speculators"].require("eagle3", tmp_path)
    with pytest.raises(ValueError, match="eagle3, dflash"):
        PEERS["speculators"].require("medusa", tmp_path)


def test_modelopt_gets_each_document_alone_padded_to_a_row() -> None:
    model = make_target()
    batch = make_batch([[make_ids(9), make_ids(7, seed=2)]], loss_from=3)
    signal = make_signal(model, batch, AUX)
    (_, _), (row, at) = list_documents(batch)
    assert (row, at.tolist()) == (0, list(range(9, 16)))
    fed = take_offline(signal, row, at, batch.input_ids_BT[row, at], width=20)
    assert fed["input_ids"].tolist() == [[*make_ids(7, seed=2), *[0] * 13]]
    assert fed["attention_mask"].sum() == 7
    alone = make_signal(model, make_batch([[make_ids(7, seed=2)]]), AUX)
    assert isinstance(alone.distribution, ExactTarget)
    assert alone.aux_BTLD is not None
    states = fed["base_model_outputs"]
    torch.testing.assert_close(
        states["base_model_hidden_states"][:, :7], alone.distribution.hidden_BTD
    )
    torch.testing.assert_close(states["aux_hidden_states"][:, :7], alone.aux_BTLD.flatten(2))
    assert not states["aux_hidden_states"][:, 7:].any()
