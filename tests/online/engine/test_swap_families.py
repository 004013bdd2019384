"""A draft that was swapped drafts exactly as one loaded at the start.

So does one pushed by vLLM's own update, and it goes on as it would beside a target that vLLM has
reloaded: every family, on each of vLLM's model runners.
"""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from swapping import run_engines
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.objective import distill_loss
from redraft.files.checkpoint import load_tokenizer
from redraft.heads.catalog import FAMILIES, find_family
from redraft.heads.draft import Batch
from redraft.heads.families import dflash, dspark, eagle1, eagle3, medusa, mtp, peagle
from redraft.heads.families.mtp_folder import as_mimo
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.target import Target


def make_tied(target, ids):
    """A standalone draft whose output head is its embeddings."""
    settings = target.config.to_dict() | {"tie_word_embeddings": True}
    return StandaloneDraft(LlamaForCausalLM(LlamaConfig.from_dict(settings)))


HEADS = {
    "standalone: tied": make_tied,
    "eagle1": lambda target, ids: eagle1.Eagle1(eagle1.Config(num_steps=3), target),
    # with the target's head: one of its own could be swapped only for another one of its own
    "eagle3": lambda target, ids: eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(0, 1, 2), own_head=False), target
    ),
    "mtp": lambda target, ids: mtp.Mtp(mtp.Config(num_steps=3), target),
    "medusa": lambda target, ids: medusa.Medusa(medusa.Config(), target),
    "peagle": lambda target, ids: peagle.PEagle(
        peagle.Config(aux_layer_ids=(0, 1, 2), num_layers=2, num_steps=4, own_head=False), target
    ),
    "dflash": lambda target, ids: dflash.DFlash(
        dflash.Config(aux_layer_ids=(1, 2), num_layers=2, block_size=4), target
    ),
    "dspark": lambda target, ids: dspark.DSpark(
        dspark.Config(aux_layer_ids=(1, 2), num_layers=2, block_size=3, markov_rank=16), target
    ),
    "dspark: reduced vocabulary, sampled": lambda target, ids: dspark.DSpark(
        dspark.Config(aux_layer_ids=(1, 2), num_layers=2, block_size=3, markov_rank=16), target, ids
    ),
}
"""Drafts by family; `ids` is a draft vocabulary."""

DRAFTS = ["standalone", *HEADS]


def decoders(name):
    return find_family(name.partition(":")[0]).decoders


@dataclass
class Pair:
    """Two drafts of one layout, of which the second is accepted more often."""

    target: Path
    poor: Path
    good: Path

    @property
    def moved(self):
        """Another target of the same layout."""
        folder = self.target.with_name(f"{self.target.name}-moved")
        if not folder.exists():
            shutil.copytree(self.target, folder)
            torch.manual_seed(1)
            for path in folder.glob("*.safetensors"):
                tensors = {
                    name: x + 0.1 * x.std() * torch.randn_like(x)
                    for name, x in load_file(path).items()
                }
                save_file(tensors, path, {"format": "pt"})
        return folder

    def spec(self, name, target, draft, *swaps):
        family, _, variant = name.partition(":")
        options = {"draft_sample_method": "probabilistic"} if "sampled" in variant else {}
        speculative = find_family(family).speculative
        return {
            "target": str(target),
            "draft": str(draft),
            "method": speculative["method"],
            "swaps": [[how, str(folder)] for how, folder in swaps],
            "speculative": speculative | options,
        }


def answer_of(model):
    """The text of `run_swaps`, and some more: prompt and answer."""
    prompt = torch.arange(10, 40)[None]
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=60, min_new_tokens=60, do_sample=False)[
            0
        ].tolist()


def learn_by_heart(head, model, text):
    batch = Batch.padded([text])
    signal = InProcessTarget(model, head.aux_layer_ids)(batch)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        distill_loss(
            head.draft_steps(batch, signal), batch, signal, Divergence(), scale=0.01
        ).loss.backward()
        optimizer.step()


def make_pair(name, target, folder):
    if name == "mtp":  # a target with room for an MTP layer
        as_mimo(target, folder / "mimo")
        target = folder / "mimo"
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    text = answer_of(model)
    known = sorted(set(text))
    size = len(model.get_input_embeddings().weight) // 2
    others = [token for token in range(2 * size) if token not in known]
    vocabularies = {"poor": others[:size], "good": sorted([*known, *others[: size - len(known)]])}
    for which, ids in vocabularies.items():
        torch.manual_seed(0)
        head = HEADS[name](Target.from_model(model), torch.tensor(ids))
        for parameter_name, parameter in head.named_parameters():
            if (
                "norm" in parameter_name
            ):  # a norm of ones in every layer would hide that a row is taken for another
                parameter.data += 0.2 * torch.randn_like(parameter)
        if which == "good":
            learn_by_heart(head, model, text)
        # A standalone draft takes the tokenizer of the target, and a head has none.
        head.export(
            folder / which,
            **({"tokenizer": load_tokenizer(target)} if name.startswith("standalone") else {}),
        )
    return Pair(target, folder / "poor", folder / "good")


@pytest.fixture(scope="module")
def pairs(random_target, registry, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    made = {
        name: make_pair(name, random_target, make_folder(folder / str(i)))
        for i, name in enumerate(HEADS)
    }
    return made | {"standalone": Pair(random_target, registry / "v000001", registry / "v000003")}


def make_folder(folder):
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def swapped(pairs):
    """By runner and family.

    The reports of an engine that swaps from the poor draft to the good one and back, gets the good
    one pushed, and reloads another target; and those of two that started with the good draft, on
    each target.
    """

    @functools.cache  # a fixture with a parameter would run all families again for each test
    def run(runner):
        names, specs = [name for name in DRAFTS if runner in decoders(name)], []
        for name in names:
            pair = pairs[name]
            swaps = [
                ("load", pair.good),
                ("load", pair.poor),
                ("push", pair.good),
                ("reload", pair.moved),
            ]
            specs.append(pair.spec(name, pair.target, pair.poor, *swaps))
            specs += [pair.spec(name, target, pair.good) for target in (pair.target, pair.moved)]
        engines = iter(run_engines(specs, runner))
        return {name: [*next(engines), *next(engines), *next(engines)] for name in names}

    return run


CASES = [(runner, name) for runner in ("v1", "v2") for name in DRAFTS if runner in decoders(name)]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("runner", "name"), CASES)
def test_a_swapped_draft_drafts_as_one_loaded_at_the_start(swapped, runner, name):
    start, forth, back, pushed, moved, fresh, fresh_on_moved = swapped(runner)[name]
    for report in (forth, back):
        assert report["result"]["ok"], report["result"]
        assert report["result"]["checksum_before"] == report["result"]["checksum_after"]
        assert report["status"]["target_intact"]
    assert start["output"] == forth["output"] == fresh["output"] == back["output"]
    assert forth["drafted"] == fresh["drafted"]
    assert back["drafted"] == start["drafted"]
    assert start["accepted"] < forth["accepted"], "the drafts must differ, or nothing is proven"
    # vLLM's own update would write the target's modules and leave copies of weights as they were.
    assert (pushed["output"], pushed["drafted"]) == (fresh["output"], fresh["drafted"])
    assert (pushed["status"]["draft_version"], pushed["status"]["draft_intact"]) == (
        "pushed-1",
        True,
    )
    assert moved["output"] != start["output"]
    assert (moved["output"], moved["drafted"]) == (
        fresh_on_moved["output"],
        fresh_on_moved["drafted"],
    )


def test_every_family_that_vllm_serves_is_here():
    served = {
        family.name
        for family in FAMILIES
        if not family.is_lookup and {"v1", "v2"} & set(family.decoders)
    }
    assert {name.partition(":")[0] for name in DRAFTS} == served
