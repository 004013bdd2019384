"""A plugin of vLLM that plants faults.

The next load of a draft fails in the second of two replicas, once the file named by FAIL_NEXT_LOAD
has been made. The file is removed then. A worker that sleeps at level 2 has the draft of the folder
FORGET_FOR in its memory: on a GPU the memory would hold anything, on a CPU all would stay as it
was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file


def register() -> None:
    from redraft.online.engine import worker as engine_worker

    load, watch_sleep = engine_worker.load_draft, engine_worker.watch_sleep
    marker, forgotten = (
        Path(os.environ["FAIL_NEXT_LOAD"]),
        Path(os.environ["FORGET_FOR"]) / "model.safetensors",
    )

    def load_or_fail(worker: Any, tensors: Any) -> None:
        # not data_parallel_rank: for a dense target vLLM sets it to 0 in all replicas
        if worker.vllm_config.parallel_config.data_parallel_index == 1 and marker.exists():
            marker.unlink()
            raise OSError("the disk went away")
        load(worker, tensors)

    def watch_sleep_of_a_forgetful(worker: Any) -> None:
        sleep = worker.sleep

        def sleep_and_forget(level: int = 1) -> None:
            sleep(level)
            if level == 2:
                load(worker, load_file(forgotten))

        worker.sleep = sleep_and_forget
        watch_sleep(worker)

    engine_worker.load_draft, engine_worker.watch_sleep = load_or_fail, watch_sleep_of_a_forgetful
