"""vLLM's sleep mode: a worker that sleeps is left alone, and has the draft again when it is awake.

At level 1 vLLM moves all weights to the host. At level 2 it drops them. Whoever wakes the server
loads the target again (`reload_weights`), but nobody the draft: it would propose nonsense, and
nothing but acceptance would tell.
"""

import logging
from typing import Any

from redraft.engine.hooks import hook
from redraft.files.artifact import MANIFEST, verify
from redraft.online.engine.swap import load_draft, read_tensors
from redraft.online.engine.target_watch import note_move

logger = logging.getLogger("vllm.redraft")

PARTS = frozenset(("weights", "kv_cache"))  # the memory that a sleeping worker gives back, by part


def watch_sleep(worker: Any) -> None:
    """Keep `worker.redraft.asleep` up to date, and load the draft again after sleep at level 2."""
    state = worker.redraft

    def note_sleep(sleep: Any) -> Any:
        def sleep_and_note(level: int = 1) -> None:
            sleep(level)
            state.asleep |= PARTS
            if level == 2:
                note_move(worker)
            if level == 2 and _has_draft(worker):
                state.is_draft_intact = False

        return sleep_and_note

    def load_awake(wake_up: Any) -> Any:
        def wake_up_with_draft(tags: list[str] | None = None) -> None:
            wake_up(tags)
            # Without tags vLLM wakes up everything.
            state.asleep -= set(tags or PARTS)
            # The cache may still sleep: loading a draft touches weights only.
            if "weights" not in state.asleep and not state.is_draft_intact and _has_draft(worker):
                _load_again(worker)

        return wake_up_with_draft

    def note_discard(discard: Any) -> Any:
        def discard_and_note(tags: tuple[str, ...]) -> None:
            discard(tags)
            state.asleep |= set(tags)

        return discard_and_note

    hook(worker, "sleep", sleep=note_sleep, wake_up=load_awake, discard=note_discard)


def _has_draft(worker: Any) -> bool:
    return worker.redraft.draft is not None and worker.model_runner.get_draft_model() is not None


def _load_again(worker: Any) -> None:
    """Load the last good draft from its folder again.

    Nothing is served meanwhile, so this may wait for the storage.
    """
    state, folder = worker.redraft, worker.redraft.draft.folder
    try:
        if (folder / MANIFEST).is_file():
            verify(folder)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no weights")
        load_draft(worker, read_tensors(files))
    except Exception:  # the target can serve without a good draft, and the status tells
        logger.exception("redraft: the draft of %s could not be loaded after sleep", folder)
    else:
        state.is_draft_intact = True
        if state.draft_version != state.loaded_version:
            state.name_draft(state.loaded_version)
        logger.info("redraft: the draft of %s was loaded again after sleep", folder)
