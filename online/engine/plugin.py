"""Entry point of vLLM's general plugins, loaded in every process of a server with redraft in VLLM_PLUGINS."""

from __future__ import annotations

import logging

from redraft.online.engine.config import is_enabled

logger = logging.getLogger("vllm.redraft")


def register() -> None:
    """Fix the CPU build, count drafts by domain, and let workers capture and swap, if VLLM_PLUGINS names redraft.

    Raises nothing: vLLM would not start. A step that fails, e.g. with a version of vLLM that lacks a name, is logged.
    """
    if not is_enabled():
        return
    # imported late: vLLM calls this in every process of every server, also of those that do not use redraft
    from redraft.eval.engine.gemm_release import patch_gemm_release
    from redraft.eval.engine.grouped_norm import patch_grouped_norm
    from redraft.eval.engine.lookups import patch_lookups
    from redraft.eval.engine.wait import patch_engine_wait
    from redraft.online.engine.cpu_fix import fix_cpu_sampling
    from redraft.online.engine.domains import count_domains
    from redraft.online.engine.worker import register_worker

    steps = (
        *(fix_cpu_sampling, patch_engine_wait, patch_gemm_release, patch_grouped_norm, patch_lookups),
        # Both patch classes. In a process without scheduler or worker they change nothing.
        *(count_domains, register_worker),
    )
    for step in steps:
        try:
            step()
        except Exception:
            logger.exception("redraft: %s failed, serving goes on without it", step.__name__)
