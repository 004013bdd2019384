"""Entry point for vLLM's general plugins.

vLLM loads it in every process of a server with redraft in VLLM_PLUGINS.
"""

import logging
from collections.abc import Callable
from functools import partial

from redraft.online.engine.config import is_enabled

logger = logging.getLogger("vllm.redraft")


def register() -> None:
    """Install every feature that this server requests, by wrapping vLLM's functions.

    It does nothing unless VLLM_PLUGINS names redraft. It never raises, because an exception would
    keep vLLM from starting. If a feature fails, e.g. because this version of vLLM lacks a name, the
    error is logged.
    """
    if not is_enabled():
        return
    # Imported late, because vLLM calls this in every process of every server, even in those that do
    # not use redraft.
    from redraft.engine import hooks
    from redraft.engine.machine import VLLM_VERSION
    from redraft.online.engine.target_watch import register_backend

    if error := hooks.find_unsupported(VLLM_VERSION):
        logger.error("redraft: nothing is recorded or swapped: %s", error)
        return

    steps: dict[str, Callable[[], None]] = {
        feature.name: partial(hooks.install_if_asked, feature) for feature in hooks.FEATURES
    }
    for name, step in (steps | {"weights from files": register_backend}).items():
        try:
            step()
        except Exception:
            logger.exception("redraft: %s failed, serving continues without it", name)
