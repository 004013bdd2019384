"""The entry point of vLLM's general plugins: loaded in every process of a server that has redraft in VLLM_PLUGINS."""

from __future__ import annotations

from online.plugin_config import is_enabled


def register() -> None:
    """Mend the CPU build and let workers capture and swap; nothing where VLLM_PLUGINS does not name redraft."""
    if not is_enabled():
        return
    from eval.engine_wait import mend_engine_wait
    from online.cpu_mend import mend_cpu_sampling
    from online.plugin_worker import register_worker

    mend_cpu_sampling()
    mend_engine_wait()
    register_worker()
