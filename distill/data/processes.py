"""Run chunks of work in processes; each process creates its tool once."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from redraft.engine.machine import count_cores
from redraft.engine.process import LIBC, PR_SET_PDEATHSIG

Tool = TypeVar("Tool")
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")

# If there are fewer chunks, they are processed here, because the imports of a new process take
# seconds.
MIN_CHUNKS = 32
MAX_PROCESSES = 32

_tool: Any = None


def map_in_processes(
    work: Callable[[Tool, Chunk], Result],
    make: Callable[[], Tool],
    chunks: Sequence[Chunk],
    cores: int | None = None,
) -> Iterator[Result]:
    """Yield `work(tool, chunk)` for every chunk, in order, from processes with one tool each.

    `work`, `make`, the chunks and the results must be picklable. If there are few chunks or only
    one core, the work is done in this process.

    Raises:
        RuntimeError: a process was killed.
    """
    cores = min(count_cores() if cores is None else cores, MAX_PROCESSES)
    tool = make()  # made here even if processes do the work, so that a wrong argument raises here
    if cores < 2 or len(chunks) < MIN_CHUNKS:
        yield from (work(tool, chunk) for chunk in chunks)
        return
    # Spawn the processes, because forking a process that has a target in memory, CUDA and gloo's
    # threads is not safe.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(cores, context, _start, (work, make, os.getpid()))
    try:
        yield from pool.map(_work, chunks)
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a tokenising process was killed, possibly because memory ran out: use fewer processes or more memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start(work: Callable[[Any, Any], Any], make: Callable[[], Any], parent: int) -> None:
    global _tool
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the process died before the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread, because each process has one core
    _tool = (work, make())


def _work(chunk: Any) -> Any:
    work, tool = _tool
    return work(tool, chunk)
