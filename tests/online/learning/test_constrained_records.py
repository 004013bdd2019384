"""Records of constrained requests, adapters and thinking modes, at the learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_world import World, make_records
from test_buffer import frames_of, make_record

from redraft.distill.data.modes import name_mode
from redraft.engine.counts import AcceptanceCounts
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.daemon.opening import provide_first_version
from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig, DraftConfig
from redraft.online.learning.gate import Decision, Policy, judge
from redraft.online.learning.intake import Sums, store
from redraft.online.learning.replay import training_sequence
from redraft.online.learning.scoring import (
    RequestScore,
    _make_batch,
    hold_to_text,
    pair_contexts,
    pair_scores,
    score_rows,
)
from redraft.online.records.origin import unpack_arguments
from redraft.online.records.record import name_base


def test_captured_acceptance_is_split_by_thinking_mode(tmp_path: Path) -> None:
    modes = {
        "code, thinking": '{"enable_thinking": true}',
        "code, no thinking": '{"enable_thinking": false}',
        "code, effort low": '{"reasoning_effort": "low"}',
        "code": "",
    }
    records = [
        make_record(i, request_id=mode, domain="code", template_arguments=arguments)
        for i, (mode, arguments) in enumerate(modes.items(), 1)
    ]
    with Buffer(BufferConfig(folder=tmp_path), name_base("target", "")) as buffer:
        sums = store(frames_of(*records), buffer, 512, 0.0).accepted
    assert {shown: one.num_drafts for (shown, _), one in sums.items()} == dict.fromkeys(modes, 1)


def test_a_record_that_arrives_again_is_counted_once_in_the_acceptance() -> None:
    first, second, third = (make_record(number, request_id=str(number)) for number in range(1, 4))
    with Buffer(BufferConfig(), name_base("target", "")) as buffer:
        found = [
            store(frames_of(*records), buffer, 512, 0.0)
            for records in ([first, second, second], [first, second], [second, third])
        ]
    drafts = [sum(taken.accepted.values(), AcceptanceCounts.zero()).num_drafts for taken in found]
    assert drafts == [2, 0, 1]
    assert [taken.counts["duplicate"] for taken in found] == [1, 2, 1]


@pytest.mark.parametrize(
    ("adapter", "kept"), [("", "base"), ("sql", "ours"), ("another", "theirs")]
)
def test_an_adapters_records_train_only_a_draft_for_that_adapter(
    adapter: str, kept: str, tmp_path: Path
) -> None:
    records = [
        make_record(1, request_id="base"),
        make_record(2, request_id="ours", adapter="sql"),
        make_record(3, request_id="theirs", adapter="another"),
    ]
    config = BufferConfig(folder=tmp_path, held_out_fraction=0)
    with Buffer(config, name_base("target", adapter)) as buffer:
        taken = store(frames_of(*records), buffer, 512, 0.0)
        assert taken.counts == {"stored": 1, "other_adapter": 2}
        assert [stored.record.request_id for stored in buffer.fresh(0, 9)] == [kept]
        sums: Sums = taken.accepted
        assert sum(sums.values(), AcceptanceCounts.zero()).num_drafts == 1
    # Another adapter's learner finds nothing in the same folder.
    with Buffer(config, name_base("target", "a third")) as buffer:
        assert not buffer.fresh(0, 9)
    # Of another target, it is foreign as ever.
    with Buffer(BufferConfig(), name_base("another target", adapter)) as buffer:
        assert store(frames_of(*records), buffer, 512, 0.0).counts == {"foreign": 3}


def test_a_constrained_record_is_judged_by_the_tokens_that_the_engine_wrote(
    random_target: Path,
) -> None:
    (plain,) = make_records(random_target, 1)
    output = plain.output_ids.copy()
    output[::3] = 9  # not what the target prefers
    record = msgspec.structs.replace(
        plain, constraints=("structured_output",), output=output.tobytes()
    )
    text = training_sequence(record)
    held = hold_to_text(text)
    written_R = text.input_ids_T[held.rows_R + 1]
    np.testing.assert_array_equal(held.topk_ids_RK[:, 0], written_R)
    assert all(len(set(ids)) == len(ids) for ids in held.topk_ids_RK.tolist())
    np.testing.assert_allclose(np.exp(held.topk_log_probs_RK).sum(1), 1)
    # Brute force: a greedy draft token is accepted if it is the written one.
    draft = StandaloneDraft.load(random_target).float().eval()
    batch = _make_batch(record, 4096, "nothing", 0)
    assert batch is not None
    rows_R, accepted_JR = score_rows(draft, batch, record.sampling, "greedy", 1)
    with torch.no_grad():
        logits_TV = draft.model(torch.from_numpy(text.input_ids_T.astype(int))[None]).logits[0]
    is_written_R = logits_TV[rows_R].argmax(-1).numpy() == text.input_ids_T[rows_R + 1]
    np.testing.assert_allclose(accepted_JR[0], is_written_R)
    assert 0 < is_written_R.sum() < len(is_written_R)


def test_the_mean_over_written_tokens_is_the_acceptance_under_the_constraint() -> None:
    rng = np.random.default_rng(0)
    p_V = rng.dirichlet(np.ones(6))
    allowed_V = np.array([1, 0, 1, 1, 0, 0])
    constrained_V = p_V * allowed_V / (p_V * allowed_V).sum()
    for draft in range(6):
        written = rng.choice(6, 200_000, p=constrained_V)
        assert (written == draft).mean() == pytest.approx(constrained_V[draft], abs=0.005)


def make_scores(modes: str, tau: dict[str, float]) -> dict[tuple[str, str], RequestScore]:
    """A request per letter: of thinking `t`, without `n`, and of an effort that one tenant asks `e`."""
    found = {}
    for number, letter in enumerate(modes):
        counts = AcceptanceCounts(num_drafts=100, num_accepted=100 * (tau[letter] - 1) + number % 3)
        mode = {"t": "thinking", "n": "no thinking", "e": "effort low"}[letter]
        tenant = "loud" if letter == "e" else f"tenant {number % 3}"
        found["boot", str(number)] = RequestScore("", counts, "target", mode, tenant)
    return found


def test_the_gate_judges_thinking_modes_as_it_judges_domains() -> None:
    modes = "t" * 60 + "n" * 40 + "e" * 30
    incumbent = make_scores(modes, {"t": 2, "n": 2, "e": 2})
    worse = make_scores(modes, {"t": 5, "n": 1.5, "e": 1.2})
    *paired, names = pair_scores(worse, incumbent, {"": "all"})
    verdict = judge(*paired, Policy(), 1, names)
    assert verdict.decision is Decision.REJECT
    assert "no thinking loses more" in verdict.reason
    assert verdict.domains.keys() == {"all", "no thinking", "thinking"}
    assert "not evaluated separately: other (30)" in verdict.reason
    assert judge(*paired, Policy(), 1).decision is Decision.PROMOTE  # over all requests it gains
    of_one_mode = judge(*paired, Policy(), 1, ["thinking"] * len(names))
    assert of_one_mode.domains.keys() == {"all"}


def make_parts(tenant: str, accepted: dict[int, float]) -> RequestScore:
    parts = {
        power: AcceptanceCounts(num_drafts=10, num_accepted=value)
        for power, value in accepted.items()
    }
    whole = sum(parts.values(), AcceptanceCounts.zero())
    return RequestScore("", whole, tenant=tenant, by_context=parts)


def test_contexts_are_paired_by_request_and_one_tenants_alone_are_left_out() -> None:
    incumbent = {("boot", f"a{i}"): make_parts("a", {64: i, 128: 2}) for i in range(20)}
    incumbent |= {("boot", f"b{i}"): make_parts("b", {64: 3, 256: 4}) for i in range(20)}
    candidate = {
        key: make_parts(one.tenant, {p: c.num_accepted + 1 for p, c in one.by_context.items()})
        for key, one in incumbent.items()
    }
    candidate["boot", "a0"] = make_parts("a", {128: 7})  # without a block at 64
    del candidate["boot", "a1"]  # its records expired
    ((power, (ours, theirs)),) = pair_contexts(candidate, incumbent).items()
    assert power == 64  # tenant a alone has 128, b alone 256
    assert [one.num_accepted for one in theirs] == [*range(2, 20), *[3] * 20]
    assert [one.num_accepted for one in ours] == [*range(3, 21), *[4] * 20]
    alone = {key: score for key, score in incumbent.items() if score.tenant == "a"}
    assert pair_contexts(candidate, alone).keys() == {64, 128}


@pytest.mark.parametrize(
    ("packed", "mode"),
    [
        ("", ""),
        ('{"enable_thinking": false}', "no thinking"),
        ('{"thinking": true, "x": 1}', "thinking"),
        ('{"reasoning_effort": "low"}', "effort low"),
        ('{"enable_thinking": true, "reasoning_effort": "high"}', "effort high"),
        ('{"reasoning_effort": "as I like"}', ""),
        ('{"reasoning_effort": {}}', ""),
        ("[1]", ""),
        ('{"enable_', ""),
    ],
)
def test_a_mode_is_one_of_a_few_whatever_a_sender_packs(packed: str, mode: str) -> None:
    assert name_mode(unpack_arguments(packed)) == mode


def test_a_registry_of_one_adapter_is_refused_for_another(
    random_target: Path, tmp_path: Path
) -> None:
    config = World.make(tmp_path, random_target, random_target, servers=0).config()
    config = replace(config, draft=DraftConfig(initial=random_target, adapter="sql"))
    registry, target = Registry(tmp_path / "registry"), TargetFolder.open(random_target)
    with registry.owned():
        provide_first_version(config, registry, target)
        provide_first_version(config, registry, target)  # a restart
        for other in ("", "another"):
            changed = replace(config, draft=replace(config.draft, adapter=other))
            with pytest.raises(ValueError, match=f"'sql', but draft.adapter is '{other}'") as error:
                provide_first_version(changed, registry, target)
            assert "\n" not in str(error.value)
