"""Entry point of vLLM's general plugins, loaded in every process of a server with redraft in
VLLM_PLUGINS.
"""

import logging

from redraft.online.engine.config import is_enabled

logger = logging.getLogger("vllm.redraft")


def register() -> None:
    """Patch vLLM, count drafts by domain, and let workers capture and swap, if VLLM_PLUGINS names
    redraft. Raises nothing: vLLM would not start. A step that fails, e.g. with a version of vLLM
    that lacks a name, is logged.
    """
    if not is_enabled():
        return
    # imported late: vLLM calls this in every process of every server, also of those that do not use
    # redraft
    from redraft.eval.engine.wait import list_patches
    from redraft.online.engine.domains import count_domains
    from redraft.online.engine.pace import patch_pace
    from redraft.online.engine.seeds import keep_seeds
    from redraft.online.engine.target_watch import pass_labels, register_backend
    from redraft.online.engine.worker import register_worker

    # The last six change nothing in a process without engine core or worker.
    # `patch_pace` after `pass_labels`: it has to see the calls that the latter replaces.
    for step in (
        *list_patches(),
        pass_labels,
        patch_pace,
        keep_seeds,
        count_domains,
        register_backend,
        register_worker,
    ):
        try:
            step()
        except Exception:
            logger.exception("redraft: %s failed, serving goes on without it", step.__name__)
