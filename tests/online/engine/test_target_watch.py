"""The watch on the target's weights: whatever replaces them, capture and swaps go off with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from redraft.online.engine import target_watch
from redraft.online.engine.target_watch import CHANGED, TargetWatch, look_at_target, watch_target
from redraft.online.engine.worker import WorkerState


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.LayerNorm(64))


def make_worker(model, **parallel):
    class Worker:
        def __init__(self):
            config = SimpleNamespace(parallel_config=SimpleNamespace(**parallel))
            self.vllm_config, self.model_runner = config, SimpleNamespace(get_model=lambda: model)
            self.redraft = WorkerState(server_id="boot", capture=SimpleNamespace(is_off=False))

        def reload_weights(self, scale):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(scale)

    return Worker()


def test_all_of_the_weights_are_compared_piece_by_piece(monkeypatch):
    monkeypatch.setattr(target_watch, "PIECE_BYTES", 1024)
    monkeypatch.setattr(target_watch, "PIECES_AT_ONCE", 3)
    model = make_model()
    watch = TargetWatch(model)
    num_looks = -(-(2 * 64 * 32 * 4 // 1024 + 2) // 3)  # two matrices in pieces, and two vectors
    assert not any(watch.is_changed() for _ in range(2 * num_looks))
    model[1].weight.data[63, 31] += 1e-3
    assert sum(watch.is_changed() for _ in range(num_looks)) == 1
    assert watch.is_changed(everywhere=True)


def test_a_weight_that_is_another_tensor_of_the_same_values_is_no_change():
    model = make_model()
    watch = TargetWatch(model)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    assert not watch.is_changed(everywhere=True)


@pytest.mark.parametrize(("scale", "is_intact"), [(1.0, True), (2.0, False)])
def test_an_update_of_the_weights_is_seen_at_once(scale, is_intact):
    worker = make_worker(make_model())
    watch_target(worker)
    worker.reload_weights(scale)
    state = worker.redraft
    assert state.is_target_intact is is_intact
    assert (state.capture_off, state.swap_off) == (("", "") if is_intact else (CHANGED, CHANGED))
    assert state.capture.is_off is not is_intact


def test_a_worker_that_sleeps_or_moves_its_experts_is_not_compared():
    model = make_model()
    asleep, moving = make_worker(model), make_worker(model, enable_eplb=True)
    for worker in (asleep, moving):
        watch_target(worker)
    asleep.redraft.asleep = {"weights"}
    model[0].weight.data += 1
    for worker in (asleep, moving):
        look_at_target(worker, everywhere=True)
        assert worker.redraft.is_target_intact
    asleep.redraft.asleep = set()
    look_at_target(asleep, everywhere=True)
    assert not asleep.redraft.is_target_intact
