"""A plugin of vLLM that lets the next load of a draft fail in the second of two replicas.

It fails once, after the file named by FAIL_NEXT_LOAD has been made, and removes the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    from redraft.online.engine import worker

    load = worker.load_draft
    marker = Path(os.environ["FAIL_NEXT_LOAD"])

    def load_or_fail(draft: Any, target: Any, files: Any, vllm_config: Any, device: Any) -> None:
        # not data_parallel_rank: for a dense target vLLM sets it to 0 in all replicas
        if vllm_config.parallel_config.data_parallel_index == 1 and marker.exists():
            marker.unlink()
            raise OSError("the disk went away")
        load(draft, target, files, vllm_config, device)

    worker.load_draft = load_or_fail
