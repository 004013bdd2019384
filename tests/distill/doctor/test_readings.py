"""Heads for drafting in parallel whose folder says something wrong.

The reading that mends it is named with its cure.

Every head has learned the target's few answers by heart, so that a wrong reading costs it most of
its acceptance.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from make_heads import make_signal, make_target, spread
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft.distill.doctor.readings import find_better_readings, list_readings
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.step import DistillStep
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.draft import Batch
from redraft.heads.families.dflash import Config, DFlash
from redraft.heads.families.dspark import Config as DSparkConfig
from redraft.heads.families.dspark import DSpark
from redraft.heads.families.peagle import Config as PEagleConfig
from redraft.heads.families.peagle import PEagle
from redraft.heads.nn.layers import rotate
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target

VOCAB = 520
"""Eight rows more than the tokenizer has tokens."""
MASK = 512
PROMPT, TEXT, NUM_TOKENS = 6, 36, 3
AUX = (1, 3, 4)

Edit = Callable[[dict[str, Any]], Any]


class World:
    """A sharp random target in a folder, its answers, and heads that know them by heart."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.folder = folder
        self.model = make_target(vocab_size=VOCAB)
        self.model.lm_head.weight.data *= 8
        self.model.save_pretrained(folder / "target")
        tokenizer.save_pretrained(folder / "target")
        ids_BT = torch.randint(0, MASK, (8, PROMPT), generator=torch.Generator().manual_seed(1))
        self.ids_BT = self.model.generate(
            ids_BT,
            max_new_tokens=TEXT - PROMPT,
            min_new_tokens=TEXT - PROMPT,
            do_sample=False,
            pad_token_id=0,
        )
        self.batch = Batch.padded(list(self.ids_BT), PROMPT)

    @functools.cache  # noqa: B019, one world for the whole module
    def trained(self, name: str) -> Path:
        """The folder of a sound head, without a word about its training."""
        target = Target.from_model(self.model)
        torch.manual_seed(0)
        head: Any = {
            "dflash": lambda: DFlash(
                Config(
                    aux_layer_ids=AUX,
                    num_layers=2,
                    block_size=4,
                    mask_token_id=MASK,
                    num_anchors=TEXT,
                ),
                target,
            ),
            "dspark": lambda: DSpark(
                DSparkConfig(
                    aux_layer_ids=AUX,
                    num_layers=2,
                    block_size=3,
                    mask_token_id=MASK,
                    num_anchors=TEXT,
                    markov_rank=4,
                ),
                target,
            ),
            "peagle": lambda: PEagle(
                PEagleConfig(
                    aux_layer_ids=AUX, num_layers=2, num_steps=3, mask_token_id=MASK, keep_ratio=1.0
                ),
                target,
            ),
        }[name]()
        signal = make_signal(self.model, self.batch, AUX)
        step, num_steps = DistillStep(head, Divergence()), 150
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_steps)
        for _ in range(num_steps):
            loss = step(self.batch, signal, scale=1 / self.ids_BT.numel())[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return self.write(head, name)

    def write(self, head: Any, name: str) -> Path:
        head.export(self.folder / name)
        edit_config(self.folder / name, lambda config: config.pop("redraft"))
        return self.folder / name

    def faulty(self, name: str, folder: Path, edit: Edit) -> Path:
        """A copy of the sound head with another config.json."""
        folder.mkdir()
        for path in self.trained(name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        edit_config(folder, edit)
        return folder

    def load(self, folder: Path) -> tuple[Pair, Any]:
        pair = Pair.read(TargetFolder.open(self.folder / "target"), folder)
        return pair, pair.family.load(
            folder, lambda: Target.from_model(self.model), torch.float32
        ).eval()

    def judge(self, folder: Path) -> list[Finding]:
        pair, head = self.load(folder)
        answers = [(ids_T[:PROMPT], ids_T[PROMPT:]) for ids_T in self.ids_BT.tolist()]
        signal = InProcessTarget(self.model, head.aux_layer_ids)
        return list(find_better_readings(pair, head, signal, answers, NUM_TOKENS))


def edit_config(folder: Path, edit: Edit) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> World:
    assert len(small_tokenizer) == MASK
    return World(tmp_path_factory.mktemp("readings"), small_tokenizer)


@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
def test_a_sound_head_has_no_better_reading(name: str, world: World) -> None:
    assert world.judge(world.trained(name)) == []


@pytest.mark.parametrize(
    ("name", "edit", "problem", "cure"),
    [
        (
            "dflash",
            lambda config: config["dflash_config"].update(mask_token_id=0),
            "the slots to fill contain token 0, but the head was trained with token 512",
            'write "mask_token_id": 512 into dflash_config of config.json',
        ),
        (
            "dspark",
            lambda config: config.update(mask_token_id=VOCAB - 1),
            "the slots to fill contain token 519, but the head was trained with token 512",
            'write "mask_token_id": 512 at the top level of config.json',
        ),
        (
            "peagle",
            lambda config: config.update(pard_token=0),
            "the slots to fill contain token 0, but the head was trained with token 512",
            'write "pard_token": 512 at the top level of config.json',
        ),
        (
            "dflash",
            lambda config: config["dflash_config"].update(target_layer_ids=[1, 3, 4]),
            "the head was trained on the aux layers [1, 3, 4], but the engine feeds it [2, 4, 5]",
            'write "target_layer_ids": [0, 2, 3] into dflash_config of config.json',
        ),
        (
            "dspark",
            lambda config: config.update(target_layer_ids=[1, 3, 4]),
            "the head was trained on the aux layers [1, 3, 4], but the engine feeds it [2, 4, 5]",
            'write "target_layer_ids": [0, 2, 3] at the top level of config.json',
        ),
        (
            "peagle",
            lambda config: config.update(eagle_aux_hidden_state_layer_ids=[0, 2, 3]),
            "the head was trained on the aux layers [1, 3, 4], but the engine feeds it [0, 2, 3]",
            'write "eagle_aux_hidden_state_layer_ids": [1, 3, 4] at the top level of config.json',
        ),
        (
            "dspark",
            lambda config: config.update(sample_from_anchor=False, block_size=4),
            "sample_from_anchor is not true, the value with which the head was trained",
            'write "sample_from_anchor": true at the top level of config.json',
        ),
        (
            "dflash",
            lambda config: config.update(
                rope_theta=2.0, rope_parameters={"rope_type": "default", "rope_theta": 2.0}
            ),
            "the head was trained with the target's rope_parameters",
            'write "rope_parameters": ',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_fault_in_config_json_is_named_with_its_cure(
    name: str, edit: Edit, problem: str, cure: str, world: World, tmp_path: Path
) -> None:
    (finding,) = world.judge(world.faulty(name, tmp_path / "head", edit))
    assert finding.problem.startswith(problem)
    assert finding.cure.startswith(cure)


def test_the_layers_of_a_head_of_speculators_are_counted_as_there(
    world: World, tmp_path: Path
) -> None:
    _, head = world.load(world.trained("dflash"))
    head.export(tmp_path / "head", layout="speculators", target_name="target")
    edit_config(
        tmp_path / "head",
        lambda config: config.update(aux_hidden_state_layer_ids=[2, 4, 5], redraft={}),
    )
    (finding,) = world.judge(tmp_path / "head")
    assert re.search(r"\[1, 3, 4\].*\[2, 4, 5\]", finding.problem)
    assert '"aux_hidden_state_layer_ids": [1, 3, 4]' in finding.cure


def test_the_order_of_the_layers_in_fc_of_a_block_drafter_is_named(
    world: World, tmp_path: Path
) -> None:
    folder = world.faulty("dflash", tmp_path / "head", lambda config: None)
    tensors = load_file(folder / "model.safetensors")
    first, second, third = tensors["fc.weight"].chunk(3, dim=1)
    save_file(
        {**tensors, "fc.weight": torch.cat([third, first, second], dim=1)},
        folder / "model.safetensors",
    )
    (finding,) = world.judge(folder)
    assert re.match(r"fc\.weight .*\[4, 1, 3\]", finding.problem)


# --- sizes of a head


def test_heads_of_another_size_than_the_targets_are_read_as_they_are(
    world: World, tmp_path: Path
) -> None:
    """Only the norms show the size.

    The rows of q_proj and k_proj fit the target's 4 heads of 8 as well, the norms of 16 numbers do
    not.
    """
    target = Target.from_model(world.model)
    shape = replace(
        LlamaShape.from_config(target.config),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    torch.manual_seed(0)
    head = DFlash(
        Config(aux_layer_ids=AUX, num_layers=1, block_size=4, mask_token_id=MASK),
        target,
        shape=shape,
    )
    head.export(tmp_path / "head")
    pair, loaded = world.load(tmp_path / "head")
    assert [p.shape for name, p in loaded.named_parameters() if name.endswith("q_norm.weight")] == [
        (16,)
    ]
    world.judge(tmp_path / "head")
    problems = [reading.problem for reading in list_readings(pair, loaded, target.head_VD)]
    assert not [problem for problem in problems if "heads of attention" in problem]


# --- the anchor's feature in the context


@torch.no_grad()
def make_reader_of_the_anchor(world: World) -> DFlash:
    """A head made by hand.

    Its first slot reads the row one position earlier and proposes what the target says there.

    With the anchor in the context this is the target's next token. Without it, this is the anchor
    once more.
    """
    target = Target.from_model(world.model)
    shape = replace(LlamaShape.from_config(target.config), num_key_value_heads=4)
    config = Config(aux_layer_ids=(5,), num_layers=1, block_size=4, mask_token_id=MASK)
    head = DFlash(config, target, shape=shape).eval()
    layer: Any = head.layers[0]
    for parameter in head.parameters():
        parameter.fill_(float(parameter.ndim == 1))
    # A row of the context is the target's last hidden state, negated so that it can be told from an
    # embedding.
    head.fc.weight.copy_(-torch.eye(shape.hidden_size))
    head.hidden_norm.weight.copy_(world.model.model.norm.weight)
    context_ND = head.feature(make_signal(world.model, world.batch, (5,))).flatten(0, 1)
    slots_ND = layer.input_layernorm(target.embed_VD)
    # All keys of the context point in one direction, those of the block mostly in the opposite one.
    wanted_N1 = torch.cat([torch.ones(len(context_ND), 1), -torch.ones(len(slots_ND), 1)])
    side_D = torch.linalg.lstsq(torch.cat([context_ND, slots_ND]), wanted_N1).solution[:, 0]
    key_E = torch.tensor([1.0] * 4 + [0.0] * 4)
    # The query is the key turned back by one position: their product is largest at a distance of
    # one.
    cos_11E, sin_11E = head._rotary(torch.tensor([[1]]), key_E)
    query_E = rotate(key_E[None, None, None], (cos_11E, -sin_11E))[0, 0, 0]
    mask_D = slots_ND[MASK]
    layer.self_attn.k_proj.weight.copy_((key_E[:, None] * side_D).repeat(4, 1))
    layer.self_attn.q_proj.weight.copy_(
        (query_E[:, None] * mask_D / mask_D.dot(mask_D)).repeat(4, 1)
    )
    for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
        norm.weight.fill_(8.0)  # sharp
    layer.self_attn.v_proj.weight.copy_(-torch.eye(shape.hidden_size))
    layer.self_attn.o_proj.weight.copy_(100 * torch.eye(shape.hidden_size))
    return head


def test_a_head_trained_with_the_feature_of_the_anchor_is_named(world: World) -> None:
    (finding,) = world.judge(world.write(make_reader_of_the_anchor(world), "reader"))
    assert re.search(r"\bfeature of the anchor\b", finding.problem)
    assert "anchor" in finding.cure


def test_a_block_that_sees_its_anchor_reads_one_row_more_and_no_other_block_does(
    world: World,
) -> None:
    _, head = world.load(world.trained("dflash"))
    signal = make_signal(world.model, world.batch, AUX)
    assert signal.aux_BTLD is not None

    def drafts(change: Tensor | None = None, *, sees_anchor: bool) -> Tensor:
        head.sees_anchor = sees_anchor
        aux_BTLD = signal.aux_BTLD if change is None else signal.aux_BTLD + change
        steps = head.draft_steps(world.batch, replace(signal, aux_BTLD=aux_BTLD))
        return torch.stack([spread(step).hidden_BTD for step in steps])[:, 0]

    # The block of row 9 has the anchor 10. Row 11 is unknown to it in any case.
    for row, seen in ((9, (True, True)), (10, (False, True)), (11, (False, False))):
        change = torch.zeros_like(signal.aux_BTLD)
        change[:, row] = 1.0
        with torch.no_grad():
            found = [
                not torch.equal(
                    drafts(sees_anchor=sees)[:, 9], drafts(change, sees_anchor=sees)[:, 9]
                )
                for sees in (False, True)
            ]
        assert tuple(found) == seen, row
