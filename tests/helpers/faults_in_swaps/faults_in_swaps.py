"""A plugin of vLLM that plants faults in swaps.

The file named by NEXT_FAULT holds the next one, and is removed then.

memory    the second of two replicas asks for more memory than there is, when it has begun to load a draft
kill      the second replica is killed there
read      a replica is killed while it reads a draft into memory, before the pause
pause     the engines pause, but nobody is told

The deadline of a pause is PAUSE_TIMEOUT_S, in seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from redraft.online.engine import swap_transaction
    from redraft.online.engine import worker as engine_worker
    from redraft.online.engine.staging import Staging

    begin, stage, pause = engine_worker._load, Staging._stage, AsyncLLM.pause_generation

    def begin_or_fail(worker: Any, *args: Any) -> dict[str, Any]:
        # not data_parallel_rank: for a dense target vLLM sets it to 0 in all replicas
        is_second = worker.vllm_config.parallel_config.data_parallel_index == 1
        load = engine_worker.load_draft

        def load_or_fail(*args: Any) -> None:
            if is_second and _take("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if is_second and _take("memory"):
                torch.empty(1 << 50)
            load(*args)

        engine_worker.load_draft = load_or_fail
        try:
            return begin(worker, *args)
        finally:
            engine_worker.load_draft = load

    def stage_or_die(staging: Any) -> None:
        if _take("read"):
            os.kill(os.getpid(), signal.SIGKILL)
        stage(staging)

    async def pause_or_hang(self: Any, *args: Any, **options: Any) -> None:
        await pause(self, *args, **options)
        if _take("pause"):
            await asyncio.Event().wait()

    engine_worker._load, Staging._stage = begin_or_fail, stage_or_die
    AsyncLLM.pause_generation = pause_or_hang
    swap_transaction.PAUSE_TIMEOUT_S = float(os.environ["PAUSE_TIMEOUT_S"])


def _take(fault: str) -> bool:
    file = Path(os.environ["NEXT_FAULT"])
    is_next = file.exists() and file.read_text() == fault
    if is_next:
        file.unlink()
    return is_next
