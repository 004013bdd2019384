"""Records of one request with refused and accepted drafts.

Heads with random weights learn from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.soak import poison
from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget
from redraft.heads.catalog import find_family
from redraft.heads.draft import final_hidden
from redraft.heads.target import Target
from redraft.online.records.record import Record, Sampling, decode_record, encode_record

LAYERS = {
    "eagle3": (0, 1, 2),
    "peagle": (0, 1, 2),
    "dflash": (1, 2),
    "dspark": (1, 2),
    "eagle1": (),
    "mtp": (2,),
}
OPTIONS = {
    "eagle1": {"num_steps": 3},
    "eagle3": {"num_steps": 3, "aux_layer_ids": LAYERS["eagle3"]},
    "mtp": {"num_steps": 3},
    "peagle": {"num_layers": 2, "num_steps": 3, "aux_layer_ids": LAYERS["peagle"]},
    "dflash": {"num_layers": 1, "block_size": 4, "aux_layer_ids": LAYERS["dflash"]},
    "dspark": {
        "num_layers": 1,
        "block_size": 3,
        "markov_rank": 8,
        "aux_layer_ids": LAYERS["dspark"],
    },
}


def make_record(**changes: Any) -> Record:
    """A prompt of 3 tokens.

    One step drafts 11, 12, 13 and accepts 11, the next drafts 21, 22, 23 and accepts all.
    """
    plain = {
        "request_id": "cmpl-1",
        "domain": "",
        "tenant": "",
        "draft_version": "",
        "hidden_shape": (0, 0),
        "hidden": b"",
    }
    return poison.make_record(7, **plain | {"sampling": Sampling(temperature=0)} | changes)


def text_of(record):
    return np.concatenate([record.context_ids, record.output_ids]).tolist()


def make_head(name: str, target: Path, folder: Path, seed: int = 0) -> Path:
    """An exported head with random weights."""
    torch.manual_seed(seed)
    family = find_family(name)
    head = family.draft_class()(family.options_class()(**OPTIONS[name]), Target.from_folder(target))
    if family.trains_lm_head:
        head.lm_head.weight.data += 0.01 * torch.randn_like(
            head.lm_head.weight
        )  # its own, as in a trained head
    head.export(folder)
    return folder


def states_of(target, ids, name):
    """The states the head reads of the target, float32 [T, L, D], by Hugging Face's forward pass."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    sample = Sample(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.ones(len(ids), bool),
        conversation="",
        domain="",
    )
    signal = InProcessTarget(model, LAYERS[name])(collate([[sample]], len(ids)))
    return signal.aux_BTLD[0] if LAYERS[name] else final_hidden(signal)[0][:, None]


def words(states_HLD):
    return states_HLD.bfloat16().contiguous().view(torch.int16).numpy().view(np.uint16)


def floats(words_HLD):
    return torch.from_numpy(words_HLD.astype(np.uint16).view(np.int16)).view(torch.bfloat16).float()


def with_states(record: Record, target: Path, name: str, begin: int = 0) -> Record:
    """The record as a server would have written it.

    All states from `begin` on, except the last token's.
    """
    states_HLD = states_of(target, text_of(record), name)[begin:-1]
    hidden = {
        "hidden_begin": begin,
        "hidden_shape": tuple(states_HLD.shape[1:]),
        "hidden": words(states_HLD).tobytes(),
    }
    return decode_record(encode_record(msgspec.structs.replace(record, **hidden)))
