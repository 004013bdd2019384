"""The watch on the target's weights.

Whatever replaces them, the next step has the name of the new ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from waiting import in_event_loop

from redraft.files.folder import lineage
from redraft.files.target_folder import TARGET_VERSION
from redraft.online.engine import swap, target_watch, worker_hooks
from redraft.online.engine.calibration import Calibration
from redraft.online.engine.class_hooks import compare_ranks
from redraft.online.engine.engine_calls import RefusedError
from redraft.online.engine.swap_transaction import Move, Swaps
from redraft.online.engine.target_watch import (
    TargetWatch,
    doubt_target,
    is_clear,
    load_target,
    look_at_target,
    name_target,
    update_rank,
)
from redraft.online.engine.worker import WorkerState, redraft_move, redraft_status
from redraft.online.engine.worker_hooks import watch_pushes, watch_sleep, watch_target


class Model(nn.Sequential):
    def load_weights(self, scale):
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(scale)


def make_model():
    torch.manual_seed(0)
    return Model(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.LayerNorm(64))


class Worker:
    """vLLM's, as far as weights go."""

    def __init__(self, model, **parallel):
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel), additional_config={}
        )
        self.model_runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: None)
        self.redraft = WorkerState(
            server_id="boot", capture=SimpleNamespace(target_version="", calibration=Calibration())
        )
        self._weight_update_active = False
        self.steps = []
        """The target's version in records of each step."""

    def execute_model(self):
        self.steps.append(self.redraft.capture.target_version)

    def reload_weights(self, scale):
        self.model_runner.get_model().load_weights(scale)

    def start_weight_update(self):
        self._weight_update_active = True

    def update_weights(self, scale):
        if scale == 0:
            self._weight_update_active = False
            raise RuntimeError("torn")
        self.model_runner.get_model().load_weights(scale)

    def finish_weight_update(self):
        self._weight_update_active = False

    def sleep(self, level=1):
        pass

    def wake_up(self, tags=None):
        pass

    def discard(self, tags):
        pass


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """Failed loads, each ended by vLLM's part of it."""
    ended = []
    monkeypatch.setattr(worker_hooks, "end_reload", ended.append)
    return ended


@pytest.fixture
def worker():
    worker = Worker(make_model())
    watch_target(worker)
    return worker


def version_of(worker):
    worker.execute_model()
    version = worker.steps[-1]
    assert (
        version
        == worker.redraft.target_version
        == worker.vllm_config.additional_config.get(TARGET_VERSION, "")
    )
    return version


def test_weights_that_return_are_the_old_version_and_equal_ones_have_equal_names(worker):
    assert version_of(worker) == ""
    versions = []
    for _ in range(2):
        worker.reload_weights(2.0)
        versions.append(version_of(worker))
        worker.reload_weights(0.5)
        assert version_of(worker) == ""
    assert versions[0] == versions[1]
    assert (versions[0][0], len(versions[0])) == ("@", 13)
    other = Worker(make_model())
    watch_target(other)
    other.start_weight_update()
    other.update_weights(2.0)
    other.finish_weight_update()
    assert version_of(other) == versions[0]


def test_a_trainers_label_is_the_name_of_these_weights_alone(worker):
    worker.reload_weights(2.0)
    digest = version_of(worker)
    name_target(worker, "step 17")
    assert version_of(worker) == f"step_17{digest}"
    worker.reload_weights(2.0)
    assert version_of(worker).startswith("@"), "nobody has named these yet"
    worker.reload_weights(0.25)
    name_target(worker, "18")
    assert version_of(worker) == "", "the folder's fingerprint names them"


def test_within_an_update_and_after_a_torn_one_no_step_has_a_name(worker, ended):
    worker.start_weight_update()
    assert version_of(worker) is None
    worker.update_weights(2.0)
    assert version_of(worker) is None
    worker.finish_weight_update()
    whole = version_of(worker)
    worker.start_weight_update()
    worker.update_weights(2.0)
    with pytest.raises(RuntimeError, match="torn"):
        worker.update_weights(0)
    assert version_of(worker) is None, "half new"
    assert ended == [worker], "no layer waits for the rest"
    assert not is_clear(worker)
    worker.start_weight_update()
    worker.finish_weight_update()
    assert version_of(worker) is None, "this update has brought nothing"
    worker.reload_weights(0.5)
    assert version_of(worker) == whole
    assert is_clear(worker)


def test_an_update_that_fails_before_it_writes_changes_nothing(worker):
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="torn"):
        worker.update_weights(0)
    assert version_of(worker) == ""
    assert is_clear(worker)


def test_weights_that_cannot_be_read_have_no_name_until_they_can(worker, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(target_watch, "find_weights", lambda model: 1 / 0)
        worker.model_runner.get_model().load_weights(2.0)
        assert version_of(worker) is None, "e.g. on `meta`"
    assert version_of(worker).startswith("@"), "tried again at the next step"


def test_a_load_past_the_worker_is_named_before_the_next_step(worker):
    model = worker.model_runner.get_model()
    for _ in range(2):  # in parts, as a trainer's extension sends them
        model.load_weights(1.5)
    assert worker.redraft.target_version == "", "not at every part"
    assert version_of(worker).startswith("@")


def test_weights_written_in_place_are_found_by_looks(worker, monkeypatch):
    monkeypatch.setattr(target_watch, "LOOK_S", 0.0)
    model = worker.model_runner.get_model()
    assert version_of(worker) == ""
    with torch.no_grad():
        model[1].weight[63, 31] += 1e-3
    before = version_of(worker)
    assert before.startswith("@"), "the matrix is part of each look"
    with torch.no_grad():
        model[2].bias += 1
    for _ in range(4):  # embeddings, matrix, and two vectors, one a look
        worker.execute_model()
    assert version_of(worker) not in ("", before)


def test_steps_and_status_look_once_in_a_while(worker, monkeypatch):
    clock, looks = [0.0], []
    monkeypatch.setattr(target_watch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(
        worker.redraft.target_watch, "is_changed", lambda: bool(looks.append(clock[0]))
    )
    for clock[0] in (100.0, 100.5, 101.0, 101.9, 102.1):
        worker.execute_model()
    assert looks == [100.0, 101.0, 102.1]
    clock[0], worker.vllm_config.speculative_config, worker.redraft.capture = 109.0, None, None
    redraft_status(worker)
    assert looks[-1] == 109.0, "nobody else looks at an idle server"


def test_all_of_the_weights_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr(target_watch, "PIECE_BYTES", 1024)
    model = make_model()
    watch = TargetWatch(model)
    num_looks = 2 * 64 * 32 * 4 // 1024 + 2  # two matrices in pieces, and two vectors
    assert not any(watch.is_changed() for _ in range(2 * num_looks))
    model[0].weight.data[63, 31] += 1e-3
    assert sum(watch.is_changed() for _ in range(num_looks)) == 1


def test_a_transposed_weight_is_read_in_the_order_of_memory(monkeypatch):
    """As vLLM keeps those of float8.

    Read row by row, one of 112 MiB would take 28,672 passes a look.
    """
    monkeypatch.setattr(target_watch, "PIECE_BYTES", 1024)
    compute, num_nested = swap.compute_sums, []
    monkeypatch.setattr(
        swap, "compute_sums", lambda tensor: num_nested.append(1) or compute(tensor)
    )
    memory = torch.randint(-8, 8, (64, 64), dtype=torch.int8)
    model = nn.Module()
    model.weight = nn.Parameter(memory.t(), requires_grad=False)
    watch = TargetWatch(model)
    assert len(watch._sums) == 4
    assert not any(watch.is_changed() for _ in range(4))
    for row in range(0, 64, 7):
        memory[row, row] += 1
        assert any(watch.is_changed() for _ in range(4)), row
        watch.settle()
    assert not num_nested, "one pass a piece"


def test_a_weight_that_is_another_tensor_of_the_same_values_is_no_change():
    model = make_model()
    watch = TargetWatch(model)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    assert not any(watch.is_changed() for _ in range(4))


def test_a_worker_that_sleeps_or_moves_its_experts_is_left_alone():
    model = make_model()
    asleep, moving = Worker(model), Worker(model, enable_eplb=True)
    for worker in (asleep, moving):
        watch_sleep(worker)
        watch_target(worker)
    asleep.sleep(2)
    asleep.reload_weights(3.0)  # e.g. before the wake-up
    for worker in (asleep, moving):
        look_at_target(worker)
        assert worker.redraft.target_version in (None, "")
    asleep.wake_up()
    assert version_of(asleep).startswith("@")
    moving.execute_model()
    assert moving.steps == [""]


def test_100_pushes_are_100_versions_and_the_way_back_meets_them_again(worker):
    names = []
    for number in range(100):
        worker.start_weight_update()
        worker.update_weights(2.0)
        assert version_of(worker) is None
        worker.finish_weight_update()
        name_target(worker, f"step-{number}")
        names.append(version_of(worker))
    labels, digests = zip(*(name.split("@") for name in names), strict=True)
    assert labels == tuple(f"step-{number}" for number in range(100))
    assert len(set(digests)) == 100
    for digest in (*digests[-2::-1], None):
        worker.reload_weights(0.5)
        assert version_of(worker) == ("" if digest is None else f"@{digest}")


def test_20_sleeps_of_level_2_leave_no_step_without_its_name(worker):
    watch_sleep(worker)
    versions = set()
    for number in range(20):
        worker.sleep(2)
        assert not is_clear(worker)
        worker.wake_up(["weights"])
        worker.reload_weights(2.0 if number % 2 else 0.5)
        worker.wake_up(["kv_cache"])
        versions.add(version_of(worker))
        assert is_clear(worker)
    assert len(versions) == 2
    assert "" in versions


def test_a_draft_that_a_trainer_pushes_has_another_name(worker):
    state, worker.weight_transfer_engine = worker.redraft, SimpleNamespace()
    forgets: list[str] = []
    state.forget_head = lambda: forgets.append(state.draft_version)
    worker.vllm_config.weight_transfer_config = SimpleNamespace(backend="redraft")
    worker._weight_update_is_draft = False
    state.draft_version = state.loaded_version = "v000003"
    watch_pushes(worker)
    worker.finish_weight_update()
    assert state.draft_version == "v000003"
    worker._weight_update_is_draft = True
    for number in (1, 2):
        worker.finish_weight_update()
        assert state.draft_version == state.capture.draft_version == f"pushed-{number}"
    assert (state.loaded_version, state.is_draft_intact) == ("v000003", True)
    assert forgets == ["pushed-1", "pushed-2"], "a lookup before it measures it anew"


def test_another_backends_push_of_a_draft_is_loaded_at_its_end_as_in_a_swap(worker, monkeypatch):
    at_once, loaded, state = [], [], worker.redraft
    draft = SimpleNamespace(load_weights=lambda weights: at_once.extend(dict(weights)))
    worker.model_runner.get_draft_model = lambda: draft
    worker.vllm_config.weight_transfer_config = SimpleNamespace(backend="nccl")
    worker.weight_transfer_engine, worker._weight_update_is_draft = SimpleNamespace(), False
    monkeypatch.setattr(
        worker_hooks, "load_draft", lambda worker, tensors: loaded.append(dict(tensors))
    )
    watch_pushes(worker)
    draft.load_weights([("swapped", torch.ones(2))])
    worker._weight_update_active = worker._weight_update_is_draft = True
    buffer = torch.ones(2)
    for name in ("a", "b"):
        draft.load_weights(iter([(name, buffer)]))
        buffer += 1  # the memory is the backend's
    assert (at_once, loaded) == (["swapped"], [])
    worker.finish_weight_update()
    assert [{name: tensor.tolist() for name, tensor in one.items()} for one in loaded] == [
        {"a": [1, 1], "b": [2, 2]}
    ]
    assert (at_once, state.draft_version, state.is_draft_intact) == (["swapped"], "pushed-1", True)
    monkeypatch.setattr(worker_hooks, "load_draft", lambda worker, tensors: {}["k_proj"])
    with pytest.raises(KeyError):
        worker.finish_weight_update()
    assert not state.is_draft_intact


class Loader(Worker):
    """Loads folders as vLLM does, whose next reload is from the last one.

    A folder's name says how much to add to the weights of the start.
    """

    def __init__(self):
        super().__init__(make_model())
        self.start = [
            weight.detach().clone() for weight in self.model_runner.get_model().parameters()
        ]
        self.vllm_config.model_config = SimpleNamespace(
            model="0", model_weights="", revision="main"
        )

    @torch.no_grad()
    def reload_weights(self, *, weights_path=None):
        source = self.vllm_config.model_config
        if weights_path is not None:
            source.model, source.revision = weights_path, None
        for weight, start in zip(
            self.model_runner.get_model().parameters(), self.start, strict=True
        ):
            weight.copy_(
                start + float(Path(source.model.rstrip("!")).name)
            )  # raises ValueError if it is no number
            if source.model.endswith("!"):
                raise OSError("the disk went away")


def test_a_folder_is_loaded_and_those_of_before_return():
    worker = Loader()
    watch_target(worker)
    assert load_target(worker, "17") == {"ok": True}
    new = version_of(worker)
    assert new.startswith("@")
    assert load_target(worker, None) == {"ok": True}
    assert version_of(worker) == ""
    assert vars(worker.vllm_config.model_config) == {
        "model": "0",
        "model_weights": "",
        "revision": "main",
    }
    for folder, is_touched in (("missing", False), ("17!", True)):
        failed = load_target(worker, folder)
        assert (failed["ok"], failed["touched"]) == (False, is_touched)
        assert (version_of(worker) is None) is is_touched
        assert worker.vllm_config.model_config.model == "0", "the next reload without a folder"
        assert load_target(worker, None) == {"ok": True}
        assert version_of(worker) == ""


def test_a_folder_with_other_tensors_is_not_begun(tmp_path):
    worker, folder = Loader(), tmp_path / "17"
    watch_target(worker)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    worker.redraft.target_tensors = {"w": "[2] of floats"}
    for tensors in (
        {"w": torch.zeros(2, dtype=torch.int64)},
        {"w": torch.zeros(3)},
        {"w": torch.zeros(2), "v": torch.zeros(2)},
    ):
        save_file(tensors, folder / "model.safetensors")
        failed = load_target(worker, str(folder))
        assert (failed["ok"], failed["touched"]) == (False, False)
        assert version_of(worker) == ""
    assert not load_target(worker, str(tmp_path / "18"))["touched"]
    save_file({"w": torch.zeros(2).half()}, folder / "model.safetensors")
    assert load_target(worker, str(folder)) == {"ok": True}


def test_a_folder_with_values_that_are_not_finite_is_refused_and_those_of_before_return():
    worker = Loader()
    watch_target(worker)
    failed = load_target(worker, "nan")
    assert (failed["ok"], failed["touched"], "finite" in failed["error"]) == (False, True, True)
    assert version_of(worker) is None
    assert load_target(worker, None) == {"ok": True}
    assert version_of(worker) == ""
    assert load_target(worker, "inf")["touched"]


def test_keys_of_weights_that_were_not_finite_are_gone_before_others_are_served(worker):
    model = worker.model_runner.get_model()
    model[1].kv_cache = [torch.full((4,), torch.nan)]
    worker.reload_weights(float("nan"))
    assert worker.redraft.target_watch.not_finite == "0.weight"
    copies = [weight.detach().clone() for weight in make_model().parameters()]
    with torch.no_grad():
        for weight, copy in zip(model.parameters(), copies, strict=True):
            weight.copy_(copy)
    target_watch.settle(worker)
    assert model[1].kv_cache[0].isnan().all(), "no step has computed with the others"
    worker.reload_weights(float("inf"))
    assert version_of(worker) is None
    worker.reload_weights(2.0)
    assert model[1].kv_cache[0].isnan().all(), "still not finite"
    with torch.no_grad():
        for weight, copy in zip(model.parameters(), copies, strict=True):
            weight.copy_(copy)
    model.load_weights(1.0)
    assert version_of(worker) == ""
    assert not model[1].kv_cache[0].any()


def test_a_weight_that_was_never_finite_is_nobodys_fault():
    model = make_model()
    model[2].bias.data[3] = -torch.inf
    worker = Worker(model)
    watch_target(worker)
    assert version_of(worker) == ""
    worker.reload_weights(2.0)
    assert version_of(worker).startswith("@")


def test_no_folder_is_loaded_within_an_update():
    worker = Loader()
    watch_target(worker)
    worker.start_weight_update()
    failed = load_target(worker, "17")
    assert (failed["ok"], failed["touched"], worker.vllm_config.model_config.model) == (
        False,
        False,
        "0",
    )


def test_a_folder_is_loaded_before_the_cache_wakes_up_and_not_before_the_weights_do():
    worker = Loader()
    watch_sleep(worker)
    watch_target(worker)
    worker.sleep(2)
    assert "asleep" in load_target(worker, "17")["error"]
    worker.wake_up(["weights"])
    assert load_target(worker, "17") == {"ok": True}
    worker.wake_up(["kv_cache"])
    assert version_of(worker).startswith("@")


def test_a_name_is_that_of_weights_written_in_place_just_before(worker):
    with torch.no_grad():
        worker.model_runner.get_model()[1].weight += 1
    name_target(worker, "17")
    assert version_of(worker).startswith("17@")


class Rank(Loader):
    """One of several ranks, which fails as told."""

    redraft_update_rank, redraft_doubt_target, redraft_move = (
        update_rank,
        doubt_target,
        redraft_move,
    )
    redraft_load_target, redraft_name_target, redraft_status = (
        load_target,
        name_target,
        redraft_status,
    )
    fails, _weight_update_is_draft = "", False

    def __init__(self):
        super().__init__()
        self.vllm_config.speculative_config = None
        self.answers = []
        """Those that vLLM has not read yet."""
        watch_target(self)

    @property
    def folder(self):
        """That of which the rank has the weights."""
        weight = next(self.model_runner.get_model().parameters())
        return round((weight - self.start[0]).mean().item())

    def reload_weights(self, *, weights_path=None):
        if self.fails == "at once" and weights_path:
            raise OSError("no such folder")
        super().reload_weights(
            weights_path=weights_path and weights_path + "!" * (self.fails == "half-way")
        )

    def update_weights(self, weights_path):
        self._weight_update_active = False  # as vLLM after a failed part
        self.reload_weights(weights_path=weights_path)
        self._weight_update_active = True


class Ranks:
    """An engine of two ranks, as vLLM's.

    The first failure ends a call, and the next one gets the answers left.
    """

    def __init__(self):
        self.all = [Rank(), Rank()]
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
        self.errored = self.is_held = False

    @compare_ranks
    def call(self, method, timeout=None, args=(), kwargs=None):
        for rank in self.all:
            try:
                rank.answers.append(getattr(rank, method)(*args, **kwargs or {}))
            except Exception as error:
                rank.answers.append(error)
        results = []
        for rank in self.all:
            results.append(rank.answers.pop(0))
            if isinstance(results[-1], Exception):
                raise RuntimeError(str(results[-1]))
        return results

    def push(self, how, path):
        """Load weights by one of three ways. Returns whether it succeeded."""
        try:
            if how == "move":
                return not any(rank["error"] for rank in self.call("redraft_move", args=("", path)))
            if how == "reload":
                self.call("reload_weights", kwargs={"weights_path": path})
            else:
                for method, *args in (
                    ("start_weight_update",),
                    ("update_weights", path),
                    ("finish_weight_update",),
                ):
                    self.call(method, args=tuple(args))
        except RuntimeError:
            return False
        return True

    async def collective_rpc(self, method, args=()):
        return self.call(method, args=args)

    async def is_paused(self):
        return self.is_held

    async def pause_generation(self, **how):
        self.is_held = True

    async def resume_generation(self):
        self.is_held = False


@pytest.mark.parametrize("how", ["reload", "update", "move"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fails", ["at once", "half-way"])
def test_ranks_of_which_one_has_failed_name_no_weights_until_all_have_the_same(how, failing, fails):
    ranks = Ranks()
    ranks.all[failing].fails = fails
    assert not ranks.push(how, "17")
    assert [version_of(rank) for rank in ranks.all] == [None, None]
    ranks.call("finish_weight_update")  # no update is open any more
    assert [version_of(rank) for rank in ranks.all] == [None, None]
    assert [rank.answers for rank in ranks.all] == [[], []], "or the next call would get these"
    ranks.all[failing].fails = ""
    assert ranks.push(how, "17")
    versions = {version_of(rank) for rank in ranks.all}
    assert len(versions) == 1
    assert versions.pop().startswith("@")
    assert ranks.push(how, "0")
    assert {version_of(rank) for rank in ranks.all} == {""}


def test_a_push_of_a_draft_that_fails_on_one_rank_says_nothing_of_the_target():
    ranks = Ranks()
    for rank in ranks.all:
        rank._weight_update_is_draft = True
    ranks.call("start_weight_update")
    ranks.all[1].fails = "at once"
    with pytest.raises(RuntimeError, match="1 of 2 ranks"):
        ranks.call("update_weights", args=("0",))
    ranks.call("finish_weight_update")
    assert [version_of(rank) for rank in ranks.all] == ["", ""]


@pytest.mark.parametrize("how", ["reload", "update", "move"])
def test_ranks_that_all_keep_their_weights_keep_their_name(how):
    ranks = Ranks()
    for rank in ranks.all:
        rank.fails = "at once"
    assert not ranks.push(how, "17")
    assert [version_of(rank) for rank in ranks.all] == ["", ""]


@in_event_loop
async def test_of_100_pushes_those_that_fail_on_one_server_leave_it_whole_and_the_others_go_on(
    tmp_path,
):
    start = tmp_path / "0"
    start.mkdir()
    (start / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.zeros(2)}, start / "model.safetensors")
    servers = {name: Ranks() for name in ("good", "failing")}
    swaps = {name: Swaps(None, server, targets=(tmp_path,)) for name, server in servers.items()}
    for rank in (rank for server in servers.values() for rank in server.all):
        rank.redraft.target_lineage, rank.redraft.capture.status = (
            lineage(start),
            lambda: {"records": 0},
        )
    digests, refused = {0: ""}, []
    for step in range(1, 101):
        start = start.rename(tmp_path / str(step))
        move = Move(folder=str(start), label=f"step-{step}")
        fails = {3: "at once", 5: "half-way"}.get(step % 7, "")
        servers["failing"].all[step % 2].fails = fails
        for name, server in servers.items():
            expected = step
            try:
                moved = await swaps[name].move(move)
                label, digests[step] = moved["target_version"].split("@")
                assert label == move.label
            except RefusedError as refusal:
                expected = step - 1
                refused.append((name, fails != "", refusal.code))
            assert not server.is_held
            for rank in server.all:
                rank.fails = ""
                assert rank.folder == expected
                assert version_of(rank).partition("@")[2] == digests[expected]
    assert refused == [("failing", True, 500)] * 28
    assert len(set(digests.values())) == 101
