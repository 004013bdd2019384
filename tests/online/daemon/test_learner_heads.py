"""Heads that learn online.

Hidden states travel from the engine into records and batches, then a verdict and a version.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import model_runners
import msgspec
import numpy as np
import pytest
import torch
from fake_fleet import TOKEN
from learner_world import QUICK, World, make_records, ship
from real_server import running_server
from recorded_heads import LAYERS, OPTIONS, floats, make_head, states_of, text_of, with_states
from reference_decoder import KeyCache, propose
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import until

from benchmarks.demo.fleet import Traffic
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.rows import take_draft_steps
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.draft import TargetSignal
from redraft.heads.families import eagle3, mtp
from redraft.heads.families.mtp_folder import as_mimo, stitch
from redraft.heads.target import Target
from redraft.online.daemon.opening import provide_first_version
from redraft.online.engine.request_log import States, join_states
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import DRAFT, Candidate, choose_reads, read_hidden_shape
from redraft.online.learning.config import BufferConfig, DraftConfig, Training
from redraft.online.learning.replay import make_batches, training_sequence
from redraft.online.learning.scoring import score
from redraft.online.records.record import Record, decode_record, encode_record, read_frames
from redraft.online.records.spool import spool_files


@pytest.fixture(scope="module")
def targets(random_target, tmp_path_factory):
    """The target of each family.

    The same model, with room for an MTP layer if the family is MTP.
    """
    mimo = tmp_path_factory.mktemp("mimo") / "target"
    as_mimo(random_target, mimo)
    return {**dict.fromkeys(LAYERS, random_target), "mtp": mimo}


# --- records and batches


def test_hidden_states_survive_the_wire_and_wrong_ones_do_not(random_target):
    (record,) = make_records(random_target, 1)
    whole = with_states(record, random_target, "eagle3", begin=2)
    assert whole.hidden_words.shape == (29, 3, 64)
    for change in (
        {"hidden_begin": 4},
        {"hidden_begin": -1},
        {"hidden": whole.hidden[:-2]},
        {"hidden_shape": (0, 64)},
    ):
        with pytest.raises(ValueError, match="hidden"):
            decode_record(encode_record(msgspec.structs.replace(whole, **change)))


def test_states_are_joined_without_a_gap_and_the_later_of_two_counts():
    def chunk(begin, *values):
        return States(begin, np.array(values, np.uint16)[:, None, None])

    def shown(states):
        return states and (states.begin, states.words_HLD.flatten().tolist())

    assert shown(join_states([chunk(0, 1, 2), chunk(2, 3)], 9, 99)) == (0, [1, 2, 3])
    assert shown(join_states([chunk(0, 1, 2), chunk(3, 4)], 9, 99)) == (3, [4]), (
        "a step between them was lost"
    )
    assert shown(join_states([chunk(0, 1, 2, 3), chunk(1, 7)], 9, 99)) == (0, [1, 7]), (
        "read again after a preemption"
    )
    assert shown(join_states([chunk(0, 1, 2, 3)], 2, 99)) == (0, [1, 2])
    assert join_states([chunk(4, 1)], 4, 99) is join_states([], 9, 99) is None


@pytest.mark.parametrize("reads", ["layers", "last"])
def test_every_token_of_a_batch_has_its_own_states_and_only_rows_with_states_count(
    random_target, reads
):
    name = {"layers": "eagle3", "last": "eagle1"}[reads]
    one, two = make_records(random_target, 2)
    records = [with_states(one, random_target, name, 0), with_states(two, random_target, name, 12)]
    texts = [training_sequence(record) for record in records]
    (batch,) = make_batches(texts, num_batches=1, sequence_length=64, seed=0, reads=reads)
    states_BTLD = (
        batch.signal.aux_BTLD if reads == "layers" else batch.signal.hidden_BTD[:, :, None]
    )
    found = 0
    for record, begin in zip(records, (0, 12), strict=True):
        ids = text_of(record)[begin:]
        for b, row in enumerate(batch.input_ids_BT.tolist()):
            for at in range(len(row) - len(ids) + 1):
                if row[at : at + len(ids)] == ids:
                    found += 1
                    assert torch.equal(
                        states_BTLD[b, at : at + len(ids) - 1].float(), floats(record.hidden_words)
                    )
                    assert not states_BTLD[b, at + len(ids) - 1].any(), (
                        "the last token was never read"
                    )
                    positions = batch.position_ids_BT[b, at : at + len(ids)].tolist()
                    assert positions == list(range(begin, begin + len(ids)))
                    labels = batch.loss_mask_BT[b, at : at + len(ids)].nonzero().flatten().tolist()
                    assert labels == list(range(max(8 - begin, 1), len(ids)))
    assert found == 2


def test_a_record_that_the_head_cannot_read_is_counted_and_not_kept(random_target):
    one, two, foreign = make_records(random_target, 3)
    good = with_states(one, random_target, "eagle3")
    other = with_states(two, random_target, "eagle1")
    foreign = msgspec.structs.replace(foreign, target_fingerprint="another")
    frames = b"".join(map(encode_record, (good, other, two, foreign)))
    with Buffer(BufferConfig(held_out_fraction=0.0), fingerprint(random_target), (3, 64)) as buffer:
        counts = buffer.append(read_frames(frames), 0.0)
        assert counts == {"stored": 1, "stateless": 2, "foreign": 1}
        assert [stored.record for stored in buffer.fresh(0, 9)] == [good]


def test_the_exported_head_says_what_it_reads(random_target, targets, tmp_path):
    assert read_hidden_shape("eagle3", make_head("eagle3", random_target, tmp_path / "3")) == (
        3,
        64,
    )
    assert read_hidden_shape("eagle1", make_head("eagle1", random_target, tmp_path / "1")) == (
        1,
        64,
    )
    assert read_hidden_shape("mtp", make_head("mtp", targets["mtp"], tmp_path / "mtp")) == (1, 64)
    assert read_hidden_shape("standalone", tmp_path) is None
    with pytest.raises(ValueError, match="eagle1, eagle3"):
        read_hidden_shape("medusa", tmp_path)


@pytest.mark.parametrize("begin", [0, 3])
def test_an_mtp_layer_learns_from_the_rows_that_an_engine_gives_it(
    random_target, targets, tmp_path, begin
):
    """Row t: the token after t, the state of t before the final norm, position t.

    Only position 0 has no embedding.

    A record of a cached prompt begins later, and so do the positions.
    """
    (record,) = make_records(random_target, 1)
    record = with_states(record, targets["mtp"], "mtp", begin)
    head = mtp.Mtp.load(
        make_head("mtp", targets["mtp"], tmp_path / "head"), Target.from_folder(targets["mtp"])
    ).eval()
    reads = choose_reads(find_family("mtp"), head)
    (batch,) = make_batches(
        [training_sequence(record)], num_batches=1, sequence_length=64, seed=0, reads=reads
    )
    (found, *_) = head.draft_steps(batch, batch.signal)
    ids = torch.tensor(text_of(record))[None]
    states_BTD = (
        states_of(targets["mtp"], ids[0].tolist(), "mtp")[None, begin:-1, 0].bfloat16().float()
    )
    positions_BT = torch.arange(begin, ids.shape[1] - 1)[None]
    expected_BTD, _ = head.step(ids[:, begin + 1 :], states_BTD, positions_BT, KeyCache())
    torch.testing.assert_close(
        found.hidden_BTD[:, : positions_BT.shape[1]], expected_BTD, atol=1e-5, rtol=1e-5
    )
    labels = (found.mask_BT[0].nonzero().flatten() + begin + found.shift).tolist()
    assert labels == list(range(max(7, begin + 1), ids.shape[1] - 1)), (
        "rows of the target that count"
    )


def test_the_layer_in_a_targets_weights_becomes_the_first_version(targets, tmp_path):
    mimo = targets["mtp"]
    layer = mtp.Mtp.load(
        make_head("mtp", mimo, tmp_path / "head", seed=5), Target.from_folder(mimo)
    )
    stitch(mimo, layer.checkpoint_tensors(), tmp_path / "target", {})
    config = World.make(tmp_path, tmp_path / "target", tmp_path / "target", servers=0).config()
    config = replace(config, draft=DraftConfig(family="mtp", initial=tmp_path / "target"))
    registry = Registry(tmp_path / "registry")
    provide_first_version(config, registry, TargetFolder.open(config.target))
    version = registry.path("v000001")
    assert sorted(path.name for path in version.glob("*.safetensors")) == ["model.safetensors"]
    assert load_file(version / "model.safetensors").keys() == layer.checkpoint_tensors().keys()
    for name, tensor in load_file(version / "model.safetensors").items():
        assert torch.equal(tensor, layer.checkpoint_tensors()[name])
    with pytest.raises(ValueError, match="MTP"):
        find_family("mtp").extract(mimo, tmp_path / "none")


def test_a_trained_layer_is_written_in_the_layout_that_a_server_swaps(
    random_target, targets, tmp_path
):
    version = make_head("mtp", targets["mtp"], tmp_path / "v000001")
    records = [
        with_states(record, targets["mtp"], "mtp") for record in make_records(random_target, 8)
    ]
    settings = Training(lr=3e-3, warmup_steps=1, sequence_length=64)
    candidate = Candidate(settings, "mtp", targets["mtp"])
    candidate.begin(version)
    losses = [candidate.step(records, seed).loss for seed in range(4)]
    assert losses[-1] < losses[0]
    candidate.write(tmp_path / "checkpoint")
    trained = tmp_path / "checkpoint" / DRAFT
    assert json.loads((trained / "config.json").read_text()) == json.loads(
        (version / "config.json").read_text()
    )
    before, after = (load_file(folder / "model.safetensors") for folder in (version, trained))
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {
        n: (t.shape, t.dtype) for n, t in before.items()
    }
    assert all(not torch.equal(before[name], after[name]) for name in before)
    layer = candidate.load(trained).state_dict()
    assert all(
        torch.equal(layer[name], tensor)
        for name, tensor in candidate.distillation.draft.state_dict().items()
    )


def test_quantised_weights_are_refused_with_the_cure(random_target, targets, tmp_path):
    mimo, eagle = targets["mtp"], make_head("eagle1", random_target, tmp_path / "eagle1")
    layer = mtp.Mtp.load(make_head("mtp", mimo, tmp_path / "head"), Target.from_folder(mimo))
    packed = {
        n: t.to(torch.float8_e4m3fn) if t.ndim > 1 else t
        for n, t in layer.checkpoint_tensors().items()
    }
    stitch(mimo, packed, tmp_path / "target", {})
    with pytest.raises(ValueError, match=r"quantised.* block\.\w+"):
        find_family("mtp").extract(tmp_path / "target", tmp_path / "alone")
    config = json.loads((eagle / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8"}
    }
    (eagle / "config.json").write_text(json.dumps(config))
    settings = World.make(tmp_path, random_target, eagle, servers=0).config()
    settings = replace(settings, draft=DraftConfig(family="eagle1", initial=eagle))
    with pytest.raises(ValueError, match=r"eagle1.*\(fp8\).*draft.initial"):
        provide_first_version(
            settings, Registry(tmp_path / "registry"), TargetFolder.open(random_target)
        )


# --- judging


def teach(head, records, reads):
    """Learn some of the tokens by heart: a useless head would accept nothing, and prove nothing."""
    texts = [training_sequence(record) for record in records]
    (batch,) = make_batches(texts, num_batches=1, sequence_length=64, seed=0, reads=reads)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(12):
        loss = 0.0
        for step in head.draft_steps(batch, batch.signal):
            rows_N = step.mask_BT.flatten().nonzero().squeeze(-1)
            labels_N = batch.input_ids_BT.flatten()[rows_N + 1 + step.shift]
            loss = loss + torch.nn.functional.cross_entropy(step.logits(rows_N), labels_N)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIONS)
def test_the_expected_counts_are_those_of_the_reference_decoder(
    random_target, targets, tmp_path, name
):
    """The counts, block by block.

    The head proposes from the states an engine would give it, and the target's text decides.
    """
    family = find_family(name)
    borrowed = Target.from_folder(targets[name])
    head = family.load(
        make_head(name, targets[name], tmp_path / "head", seed=3), lambda: borrowed
    ).eval()
    records = [with_states(r, random_target, name) for r in make_records(random_target, 6)]
    reads = choose_reads(family, head)
    teach(head, records, reads)
    scored = score(
        head, records, num_speculative_tokens=2, method="greedy", sequence_length=64, reads=reads
    )
    for record, found in zip(records, scored, strict=True):
        numbers = [number for _, _, number in verify_blocks(head, record, reads)]
        assert (found.num_drafts, found.num_accepted) == (len(numbers), sum(numbers))
    assert sum(one.num_accepted for one in scored) > 0


def verify_blocks(head, record, reads):
    """(prefix, draft tokens, how many of them are the text's) of every block of two tokens."""
    ids = [*record.context_ids.tolist(), *record.output_ids.tolist()]
    states_TLD = floats(record.hidden_words)[None]
    # Row r predicts token r + 1; the last row would need the last token's states.
    row, last = record.num_prompt_tokens - 1, len(ids) - 2
    while row + 1 <= last:
        prefix = ids[: row + 1]
        aux_BTLD = states_TLD[:, :row]
        signal = TargetSignal(
            distribution=None,
            aux_BTLD=aux_BTLD if reads == "layers" else None,
            hidden_BTD=aux_BTLD[:, :, 0] if reads == "last" else None,
        )
        proposed = [token for token, _ in propose(head, prefix, signal, 2)]
        matches = [a == b for a, b in zip(proposed, ids[row + 1 :], strict=False)]
        number = 2 if all(matches) else matches.index(False)
        yield prefix, proposed, number
        row += number + 1


# --- the learner


@pytest.fixture(scope="module")
def records(random_target):
    return [
        with_states(record, random_target, "eagle3") for record in make_records(random_target, 400)
    ]


@pytest.fixture
def world(random_target, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    return World.make(
        tmp_path, random_target, make_head("eagle3", random_target, tmp_path / "head")
    )


def play(world, script, **changes):
    async def main():
        draft = DraftConfig(family="eagle3", initial=world.draft)
        async with world.fleet(), world.learner(draft=draft, **changes) as task:
            await script(task)

    asyncio.run(main())


def test_a_better_head_is_trained_from_records_proven_and_swapped_in(world, records):
    settings = replace(world.config().training, lr=3e-3, patience=50)

    async def script(task):
        ship(world.spool, records)
        await until(lambda: world.registry.current() not in (None, "v000001"), task)
        version = world.registry.current()
        await until(lambda: all(fake.version == version for fake in world.fakes), task)

    # 64 records at a time teach a random target's head little: the gain is small, but proven.
    play(world, script, training=settings, gate=replace(world.config().gate, min_gain=0.005))
    version = world.registry.path(world.registry.current())
    trained = eagle3.Eagle3.load(version, Target.from_folder(world.target))
    begun = eagle3.Eagle3.load(world.draft, Target.from_folder(world.target))
    assert not torch.equal(trained.fc.weight, begun.fc.weight)
    assert json.loads((version / "config.json").read_text()) == json.loads(
        (world.draft / "config.json").read_text()
    )


@pytest.mark.slow
def test_a_head_of_a_block_is_trained_and_served(random_target, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    world = World.make(
        tmp_path, random_target, make_head("dspark", random_target, tmp_path / "head")
    )
    settings = replace(world.config().training, lr=3e-3, patience=50)
    draft = DraftConfig(family="dspark", initial=world.draft)

    async def main():
        # A random target teaches little: after 256 records the gain is 0.006, with an interval of
        # 0.004 to each side.
        cfg = {
            "draft": draft,
            "training": settings,
            "gate": replace(world.config().gate, min_gain=0.0005),
        }
        async with world.fleet(), world.learner(**cfg) as task:
            ship(
                world.spool,
                [with_states(r, random_target, "dspark") for r in make_records(random_target, 600)],
            )
            await until(lambda: world.registry.current() not in (None, "v000001"), task)

    asyncio.run(main())


def test_records_without_states_are_told_and_a_head_of_another_family_is_refused(
    world, random_target, tmp_path
):
    async def script(task):
        ship(world.spool, make_records(random_target, 5))
        await until(lambda: (world.last("buffer", "dropped") or {}).get("stateless") == 5, task)

    play(world, script)
    (tmp_path / "other").mkdir()
    other = World.make(
        tmp_path / "other", random_target, make_head("eagle1", random_target, tmp_path / "eagle1")
    )
    with pytest.raises(ValueError, match=r"eagle1.*eagle3"):
        play(other, script)


def test_a_head_whose_matrix_the_engine_would_share_is_refused_at_the_start(
    world, random_target, tmp_path
):
    untrained = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=3), Target.from_folder(random_target)
    )
    untrained.export(tmp_path / "untrained")
    settings = world.config(draft=DraftConfig(family="eagle3", initial=tmp_path / "untrained"))
    with pytest.raises(ValueError, match=r"lm_head\.weight.*untrained"):
        provide_first_version(
            settings, Registry(tmp_path / "registry"), TargetFolder.open(random_target)
        )
    assert not Registry(tmp_path / "registry").versions()


def test_a_head_of_another_width_is_refused_before_it_is_published(world, random_target, tmp_path):
    config = LlamaConfig.from_pretrained(random_target, hidden_size=32)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "narrow")
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=3), Target.from_folder(tmp_path / "narrow")
    )
    head.export(tmp_path / "narrow-head")
    settings = world.config(draft=DraftConfig(family="eagle3", initial=tmp_path / "narrow-head"))
    with pytest.raises(ValueError, match=r"draft\.initial .*narrow-head") as refused:
        provide_first_version(
            settings, Registry(tmp_path / "registry"), TargetFolder.open(random_target)
        )
    assert "\n" not in str(refused.value)
    assert not Registry(tmp_path / "registry").versions()


# --- the engine


CAPTURED = [("v1", name) for name in ("eagle3", "eagle1", "mtp", "dflash", "peagle")] + [
    ("v2", name) for name in ("eagle3", "eagle1", "mtp", "dflash", "dspark")
]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("runner", "name"), CAPTURED)
def test_what_is_captured_is_what_the_head_reads_in_serving(targets, tmp_path, runner, name):
    """The captured states are the served ones.

    They are compared over prompts of one step and of several, cached or not, of requests running
    side by side, greedy or sampled.
    """
    family, target = find_family(name), targets[name]
    rng = np.random.default_rng(0)
    long, short, other = (rng.integers(8, 500, count).tolist() for count in (150, 20, 33))
    draft = make_head(name, target, tmp_path / "head")
    sampled = [{"temperature": 1.0, "seed": i, "max_tokens": 48} for i in range(2)]
    spec = {
        "target": str(target),
        "draft": str(draft),
        "method": family.method,
        "speculative": family.speculative
        | ({"draft_sample_method": "probabilistic"} if family.can_sample else {}),
        "spool": str(tmp_path / "spool"),
        "rounds": [
            {"prompts": [long, short, other]},
            {"prompts": [long]},
            {"prompts": [short[:9], other[:7]], "sampling": sampled},
        ],
    }
    script = Path(__file__).parents[2] / "helpers/run_capture.py"
    command = [sys.executable, script, json.dumps(spec)]
    environment = model_runners.environment(runner)
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)
    answers = next((line for line in done.stdout.splitlines() if line.startswith("REPORT")), None)
    assert answers, done.stderr[-3000:]
    rounds = json.loads(answers.removeprefix("REPORT"))["answers"]
    first, second, third = [[tokens for (tokens,) in answered] for answered in rounds]
    frames = [
        frame
        for path in spool_files(tmp_path / "spool")
        for frame in read_frames(path.read_bytes())
    ]
    records = [record for _, record in frames]
    assert all(isinstance(record, Record) for record in records)
    texts = [long + first[0], short + first[1], other + first[2], long + second[0]]
    texts += [short[:9] + third[0], other[:7] + third[1]]
    found = [text_of(record) for record in records]
    assert sorted(found) == sorted(texts)
    for record, text in zip(records, found, strict=True):
        expected_TLD = states_of(target, text, name)
        states_HLD = floats(record.hidden_words)
        begin, end = record.hidden_begin, record.hidden_begin + len(states_HLD)
        assert end >= len(text) - 1, "the newest tokens are there"
        torch.testing.assert_close(states_HLD, expected_TLD[begin:end], atol=0.03, rtol=0.01)
    begins = sorted(record.hidden_begin for record in records)
    assert begins[:5] == [0] * 5
    assert begins[5] > 0, "the second time the prompt was cached"
    head = family.load(draft, lambda: Target.from_folder(target)).eval()
    compared = records if family.can_sample else []
    differences = [
        one
        for record in compared
        for one in compare_drafts(head, name, record, states_of(target, text_of(record), name))
    ]
    assert len(differences) > 30 or not family.can_sample
    assert max(map(abs, differences), default=0) < 1e-3


@torch.no_grad()
def compare_drafts(head, name, record, states_TLD):
    """Log-probabilities of sampled draft tokens in the engine, less those that training gives them.

    Only of tokens after accepted ones: the text of the record shows the tokens that the head read.
    The states are the target's in float32, as the head read them in the engine. The record has them
    in bfloat16, and a random head can turn that rounding into a difference of 0.2 in a
    log-probability.
    """
    if not record.sampling.temperature:
        return []
    reads = choose_reads(find_family(name), head)
    (batch,) = make_batches(
        [training_sequence(record)], num_batches=1, sequence_length=256, seed=0, reads=reads
    )
    steps = take_draft_steps(
        head, batch, with_exact_states(batch.signal, states_TLD[record.hidden_begin :]), 3
    )
    found, number = [], 0
    for position, branch, token, prob in zip(
        record.positions, record.branches, record.draft_ids, record.draft_probs, strict=True
    ):
        if token >= 0 and branch == 0:
            row = torch.tensor([position - 1 - steps[number].shift - record.hidden_begin])
            logits_V = steps[number].logits(row)[0]
            found.append(math.log(prob) - float(logits_V.log_softmax(-1)[token]))
        number = number + 1 if token >= 0 else 0
    return found


def with_exact_states(signal, states_TLD):
    """The signal with the target's float32 states in place of the recorded ones.

    The recorded ones end one token earlier.
    """
    field = "hidden_BTD" if signal.aux_BTLD is None else "aux_BTLD"
    recorded = getattr(signal, field)
    exact = torch.zeros(recorded.shape)
    num = min(len(states_TLD), recorded.shape[1])
    exact[0, :num] = states_TLD[:num].reshape(num, *recorded.shape[2:])
    return replace(signal, **{field: exact})


@pytest.fixture
def tiny_world(tiny_target, tmp_path, monkeypatch):
    """A target with words to predict, and a head initialised from its last layer."""
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    model = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    head = eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(2, 4, 7), num_steps=3, own_head=False),
        Target.from_model(model),
    )
    head.init_from_layers([model.base_model.layers[-1]], model.base_model.norm)
    head.export(tmp_path / "head")
    world = World.make(tmp_path, tiny_target, tmp_path / "head", servers=0)
    provide_first_version(world.config(draft=DraftConfig(family="eagle3", initial=world.draft)), world.registry,
                          TargetFolder.open(tiny_target))  # fmt: skip
    return world


@pytest.mark.vllm
@pytest.mark.slow
def test_a_real_server_ends_with_a_head_that_was_trained_on_its_own_traffic(tiny_world, tmp_path):
    world = tiny_world
    ids = load_tokenizer(world.target)(Path(ast.__file__).read_text())["input_ids"]
    prompts = [
        Prompt(token_ids=ids[begin : begin + 24], domain="code")
        for begin in range(0, len(ids) - 24, 24)
    ]

    async def main():
        options = ["--method", "eagle3", "--capture.hidden-states"]
        with running_server(world.target, world.registry.folder, tmp_path, options) as server:
            clients = Traffic(
                [server.url], {"code": prompts}, clients=4, max_tokens=48, pause_s=0.05
            )
            cfg = {
                "draft": DraftConfig(family="eagle3", initial=world.draft),
                "fleet": FleetConfig(servers=(server.url,), poll_s=0.5),
                "training": replace(world.config().training, sequence_length=128, patience=50),
                "rollout": replace(QUICK, min_drafts=200, window_timeout_s=60, swap_timeout_s=10),
            }
            async with world.learner(**cfg) as task, clients.flowing():
                await until(lambda: world.registry.current() != "v000001", task, timeout_s=500)
            status = server.status()
            assert (status["draft_version"], status["target_intact"]) == (
                world.registry.current(),
                True,
            )
            assert clients.answers
            assert clients.failures == []

    asyncio.run(main())
    # On a busy machine a few segments arrive without a usable state. They are refused and counted.
    assert 20 * world.last("buffer", "dropped").get("stateless", 0) <= world.last(
        "buffer", "records"
    )
