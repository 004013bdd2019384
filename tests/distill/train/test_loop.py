"""What a launch is told of its machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redraft.distill.train import loop


@pytest.mark.parametrize(
    ("precision", "computes", "is_told"), [("bf16", False, True), ("bf16", True, False), ("no", False, False)]
)
def test_a_run_is_told_where_bfloat16_is_no_help(
    precision: str, computes: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def accelerator(**of: Any) -> SimpleNamespace:
        return SimpleNamespace(mixed_precision=of["mixed_precision"], is_main_process=True)

    monkeypatch.setattr(loop, "Accelerator", accelerator)
    monkeypatch.setattr(loop, "computes_bfloat16", lambda: computes)
    loop.make_accelerator(1, precision, None)
    assert ("no instructions for bfloat16" in capsys.readouterr().out) == is_told


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
def test_a_cpu_that_computes_in_bfloat16_has_the_instructions_for_it() -> None:
    if loop.computes_bfloat16():
        assert torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")
