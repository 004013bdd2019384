"""What cannot be meant is refused with the flag's name, before any work."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import Data, Loop, Prove, Signal


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Loop(steps=0), r"\bsteps\b.*\b0\b"),
        (lambda: Loop(log_every=0), r"\blog_every\b.*\b0\b"),
        (lambda: Loop(sequence_length=1), r"\bsequence_length\b"),
        (lambda: Optim(lr=0.0), r"\blr\b.*\b0\.0\b"),
        (lambda: Optim(max_grad_norm=0.0), r"max_grad_norm\b.*\b0\.0\b"),
        (lambda: Optim(max_grad_norm=math.nan), r"max_grad_norm\b.*\bnan\b"),
        (lambda: Optim(warmup_fraction=100), r"warmup_fraction\b.*\b100\b"),
        (lambda: Optim(accumulation=0), r"accumulation.*\b0\b"),
        (lambda: Prove(concurrency=0), r"\bconcurrency\b.*\b0\b"),
        (lambda: Prove(num_speculative_tokens=0), r"\bnum_speculative_tokens\b.*\b0\b"),
        (lambda: Data(held_out=0.0), r"--data\.held-out\b.*\b0\.0\b"),
        (lambda: Data(num_prompts=0), r"\bnum_prompts\b"),
        (lambda: Data(date="today"), r"--data\.date.*'today'.*YYYY-MM-DD"),
        (lambda: Signal(k=0), r"\bk\b.*\b0\b"),
        (
            lambda: Endpoint("localhost:8000"),
            r"'localhost:8000'.*http://HOST:PORT",
        ),
        (lambda: Endpoint("http://localhost:8000", concurrency=0), r"concurrency.*\b0\b"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_the_optimizers_settings_load_without_torch() -> None:
    code = "import sys, redraft.distill.train.optim; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
