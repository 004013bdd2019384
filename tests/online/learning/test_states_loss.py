"""The acceptance that float8 states cost, by the forecast on held-out answers of the small target.

Prints the figures:

pytest -s tests/online/learning/test_states_loss.py
"""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from make_answers import make_answers
from transformers import LlamaForCausalLM

from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget
from redraft.eval.intervals import estimate_gain
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import fingerprint
from redraft.heads.families import eagle3
from redraft.heads.nn.float8 import encode_float8
from redraft.heads.target import Target
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Training
from redraft.online.learning.scoring import score
from redraft.online.records.record import Sampling

LAYERS = (2, 4, 7)
PROMPT, ANSWER, TRAINED, HELD_OUT, STEPS = 24, 40, 96, 64, 48


def make_records(model, target):
    """Greedy answers to pieces of Python, with the target's states of every token.

    The states are in bfloat16 and in float8.
    """
    ids = load_tokenizer(target)(Path(ast.__file__).read_text())["input_ids"]
    prompts_BT = torch.tensor(ids[: PROMPT * (TRAINED + HELD_OUT)]).view(-1, PROMPT)
    texts_BT = model.generate(prompts_BT, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None)
    mask_T = np.arange(texts_BT.shape[1]) >= PROMPT
    samples = [
        Sample(
            input_ids=text.numpy().astype(np.int32),
            loss_mask=mask_T,
            conversation=str(i),
            domain="code",
        )
        for i, text in enumerate(texts_BT)
    ]
    source = InProcessTarget(model, LAYERS)
    records = make_answers(samples, InProcessTarget(model), fingerprint(target), k=32)
    records = [
        msgspec.structs.replace(record, sampling=Sampling(temperature=0)) for record in records
    ]
    by_format = {"bfloat16": [], "float8": []}
    for record, sample in zip(records, samples, strict=True):
        states_HLD = source(collate([[sample]], len(sample.input_ids))).aux_BTLD[0, :-1].bfloat16()
        words = {"bfloat16": states_HLD.view(torch.int16), "float8": encode_float8(states_HLD)}
        for name, encoded in words.items():
            fields = {"hidden_shape": tuple(states_HLD.shape[1:]), "hidden_format": name}
            hidden = encoded.contiguous().numpy().tobytes()
            by_format[name].append(msgspec.structs.replace(record, hidden=hidden, **fields))
    return by_format


def count(head, records):
    """Accepted tokens and drafts of every record, [N, 2]."""
    found = score(
        head,
        records,
        num_speculative_tokens=3,
        method="greedy",
        sequence_length=128,
        reads="layers",
    )
    return np.array([(one.num_accepted, one.num_drafts) for one in found])


def tau(counts_N2):
    accepted, drafts = counts_N2.sum(0)
    return 1 + accepted / drafts


def gain(ours_N2, theirs_N2):
    """The 95% interval of the difference in tau, over the same answers."""
    both_N22 = np.stack([ours_N2, theirs_N2], axis=1)
    return estimate_gain(both_N22[..., 0], both_N22[..., 1]).interval()


@pytest.mark.slow
def test_float8_costs_less_than_a_hundredth_of_the_acceptance(tiny_target, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=LAYERS, num_steps=3, own_head=False), Target.from_model(model)
    )
    head.init_from_layers([model.base_model.layers[-1]], model.base_model.norm)
    head.export(tmp_path / "head")
    with torch.no_grad():
        records = make_records(model, tiny_target)
    held_out = {name: found[TRAINED:] for name, found in records.items()}
    untrained = tau(count(head.eval(), held_out["bfloat16"]))
    found = {}
    training = Training(lr=1e-3, warmup_steps=4, sequence_length=128)
    for name in ("bfloat16", "float8"):
        candidate = Candidate(training, "eagle3", tiny_target)
        candidate.begin(tmp_path / "head")
        rng = np.random.default_rng(0)
        for step in range(STEPS):
            chosen = rng.choice(TRAINED, 16, replace=False)
            candidate.step([records[name][i] for i in chosen], step)
        trained = candidate.distillation.draft.eval()
        found |= {(name, other): count(trained, held_out[other]) for other in held_out}
    exact = found["bfloat16", "bfloat16"]
    print(f"untrained: tau {untrained:.3f}")
    for (name, other), counts in found.items():
        low, high = gain(counts, exact)
        print(
            f"trained on {name}, read as {other}: tau {tau(counts):.3f}, {low:+.3f} to {high:+.3f} "
            "against bfloat16"
        )
        assert abs(tau(counts) - tau(exact)) < 0.01 * tau(exact)
    assert tau(exact) - 1 > 1.5 * (untrained - 1), "a useless head would lose nothing"
