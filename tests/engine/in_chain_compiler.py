"""The kernel of lookups on the device, compiled for GPUs as it is launched.

No GPU is needed, and nothing runs. `test_lookup_on_device.py` runs this file in a process that has
Triton.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_compiler import GPUS, MI300X, Gpu, Launches

import redraft.engine
from redraft.engine import chain_kernel
from redraft.engine.device_runs import DeviceRuns
from redraft.heads.families.retrieval import Config, Live, Retrieval, Text, count_answers


def make_drafts() -> list[Retrieval]:
    ids = np.random.default_rng(0).integers(0, 4, 300).astype(np.int32)
    text = Text(ids=ids, is_label=np.ones(len(ids), bool))
    return [Live(Config(max_entries=1000)), count_answers([text], Config())]


@pytest.mark.parametrize("gpu", [*GPUS, MI300X], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("most", [1, 6])
def test_a_launch_compiles_and_keeps_nearly_all_values_in_registers(
    most: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(chain_kernel, gpu)
    monkeypatch.setattr(redraft.engine, "chain_kernel", launches)
    for draft in make_drafts():
        texts_ST = torch.zeros(2, 8192, dtype=torch.int32)
        lengths_S, newest_S1 = torch.ones(2, dtype=torch.int32), torch.zeros(2, 1).long()
        runs = DeviceRuns(draft, torch.device("cpu"))
        runs.follow(
            texts_ST, lengths_S, torch.tensor([0, 1]), lengths_S, newest_S1, [b"", b""], most, 6
        )
    assert [kernel.name for kernel in launches.kernels] == ["follow_chains"] * 2
    for kernel in launches.kernels:
        assert kernel.stack_bytes <= 16  # of one thread, on H100 and B200
        assert kernel.shared_bytes <= gpu.shared_bytes


def test_a_pace_of_one_token_runs_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, Triton would compile it when the pace first chooses one token."""
    launches = Launches(chain_kernel, GPUS[1])
    monkeypatch.setattr(redraft.engine, "chain_kernel", launches)
    texts_ST, lengths_S = torch.zeros(2, 8192, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    runs = DeviceRuns(make_drafts()[0], torch.device("cpu"))
    for most in (1, 3, 16):
        runs.follow(
            texts_ST, lengths_S, torch.tensor([0, 1]), lengths_S, torch.zeros(2, 1).long(),
            [b"", b""], most, 16,
        )  # fmt: skip
    assert len({kernel.ptx for kernel in launches.kernels}) == 1
