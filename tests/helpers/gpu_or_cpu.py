"""Where tests/gpu run.

On a GPU, or with REDRAFT_GPU_TESTS_ON=cpu on the CPU, so that they cannot rot unseen.

On the CPU Triton's interpreter runs the kernels, with small vocabularies. Streams exist on a GPU
only.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from model_runners import TRITON, triton_interpreter

DEVICE = torch.device(os.environ.get("REDRAFT_GPU_TESTS_ON", "cuda"))
IS_GPU = DEVICE.type == "cuda"

ON_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONLY_ON_GPU = pytest.mark.skipif(not IS_GPU, reason="of GPUs only")

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
"""Of the attention of a model: FlexAttention takes heads of 16 or more."""

if not IS_GPU:
    try:
        os.environ |= triton_interpreter()
    except pytest.skip.Exception as problem:
        pytest.skip(str(problem), allow_module_level=True)
    sys.path.insert(0, str(TRITON))
