"""The learner's start.

Check and open the folders, the registry, the buffer and the first version. The learner owns them
while it runs.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from redraft.distill.data.rendering import Renderer
from redraft.distill.data.turns import QUESTION
from redraft.files.artifact import is_full
from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import read_config, read_quantization, text_sections
from redraft.files.lock import own
from redraft.files.target_folder import TargetFolder
from redraft.files.tokenizers import check_same_tokenizer
from redraft.heads.catalog import find_family, require_head, require_trained_for
from redraft.heads.doctor.checks import completeness
from redraft.heads.doctor.pair import Pair
from redraft.heads.doctor.shared import require_own_head
from redraft.heads.provenance import read_provenance
from redraft.online.daemon.config import LearnerConfig
from redraft.online.fleet.registry import Registry, copy_model, read_id
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import read_hidden_shape
from redraft.online.learning.prompt_key import NO_HEADERS, Headers
from redraft.online.records.record import name_base
from redraft.online.records.spool import emptying

if TYPE_CHECKING:
    from redraft.online.learning.stream import StreamSource

FULL_DISK_RETRY_S = 1.0


@contextmanager
def opened(cfg: LearnerConfig) -> Iterator[tuple[str, Registry, Buffer]]:
    """Yield the target's fingerprint, the registry and the buffer, owned while the block runs.

    Waits while a disk is full.

    Raises:
        ValueError, OSError, AlreadyOwnedError: the same as `run`.
    """
    is_told = False
    with ExitStack() as stack:
        while True:
            try:
                found = _open(cfg, stack)
                break
            except OSError as error:
                # Locks taken before an error are released. A closed ExitStack can be reused.
                stack.close()
                if not is_full(error):
                    raise
                if not is_told:
                    print(
                        f"the learner is waiting, because a disk is full: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
                is_told = True
                time.sleep(FULL_DISK_RETRY_S)
        yield found


def _open(cfg: LearnerConfig, stack: ExitStack) -> tuple[str, Registry, Buffer]:
    cfg.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it contains users' text
    registry = Registry(cfg.registry)
    stack.enter_context(own(cfg.folder / "learner.lock", "a learner"))
    for abandoned in cfg.folder.glob(
        ".*.partial"
    ):  # temporary files of `write_whole`, left by a learner that was killed
        if abandoned.is_file():
            abandoned.unlink(missing_ok=True)
    stack.enter_context(registry.owned())
    stack.enter_context(emptying(cfg.spool))
    target = TargetFolder.open(cfg.target)
    provide_first_version(cfg, registry, target)
    headers = read_headers(target)
    return (
        target.fingerprint,
        registry,
        stack.enter_context(open_buffer(cfg, registry, target.fingerprint, headers)),
    )


def read_headers(target: TargetFolder) -> Headers:
    """Return the headers for the buffer, or `NO_HEADERS` if the tokenizer does not give them."""
    # The target may have no tokenizer, a template that is not valid, or a tokenizer of another
    # library. Without headers, fewer turns are recognised, and everything else works.
    with suppress(Exception):
        return find_headers(target.tokenizer)
    return NO_HEADERS


def find_headers(tokenizer: Any) -> Headers:
    """Return the tokens with which this tokenizer's chat template ends a prompt.

    Raises:
        ValueError: the template is not valid.
    """
    marks, found = frozenset(tokenizer.added_tokens_decoder), set[bytes]()
    render = Renderer(tokenizer, {}, datetime.date(2000, 1, 1))
    if tokenizer.chat_template is not None and (form := render.reasoning_form):
        for arguments in render.arguments:
            with suppress(jinja2.TemplateError):  # a template may refuse arguments
                prompt = render(QUESTION, prompt=True, arguments=arguments)
                before = prompt.removesuffix(form.trailing_tags(prompt))
                ids, whole = render.tokenise([before, prompt])
                if whole[: len(ids)] == ids:
                    found.add(np.array(whole[len(ids) :], "<i4").tobytes())
    return Headers(marks=marks, tags=frozenset(found - {b""}))


def open_buffer(
    cfg: LearnerConfig,
    registry: Registry,
    target_fingerprint: str,
    headers: Headers = NO_HEADERS,
) -> Buffer:
    """Open the learner's buffer, which accepts records that the current version can learn from.

    `headers` is needed only if records will be added.

    Raises:
        ValueError: drafts of this family cannot learn online.
        AlreadyOwnedError,
        BufferFullError: as `Buffer` does.
    """
    states, needed = None, 0
    # A learner always has a current version, but a tenant can also be deleted without one.
    if registry.current() in registry.versions():
        version = registry.current_path()
        states = read_hidden_shape(cfg.draft.family, version)
        family = find_family(cfg.draft.family)
        needed = 0 if states is None else family.needed_states(read_config(version))
    known = frozenset(cfg.judging.domains)
    base = name_base(target_fingerprint, cfg.draft.adapter)
    return Buffer(cfg.buffer_config, base, states, known, needed, headers)


def provide_first_version(cfg: LearnerConfig, registry: Registry, target: TargetFolder) -> None:
    """Make sure that the registry has a current version.

    If the registry is empty, the initial draft becomes the first version.

    Raises:
        ValueError: the registry is empty and there is no initial draft, no version that was ever
            current is intact, or a draft is for a different target or tokenizer.
    """
    if not registry.versions():
        if cfg.draft.initial is None:
            raise ValueError(
                f"{registry.folder} has no version yet: set draft.initial to the draft that is "
                "currently served"
            )
        initial, family = cfg.draft.initial, find_family(cfg.draft.family)
        copy: Callable[[Path, Path], None] = copy_model
        if family.is_in_target and initial.resolve() == cfg.target.resolve():
            copy = family.extract
        else:
            _require_fitting(initial, cfg, target)
        registry.publish(
            lambda partial: copy(initial, partial),
            target_fingerprint=target.fingerprint,
            provenance={
                "copied_from": initial,
                "target_lineage": target.lineage,
                "adapter": cfg.draft.adapter,
            },
            evaluation={},
        )
    registry.repair()
    try:
        require_trained_for(registry.current_path(), target)
    except ValueError as error:
        raise ValueError(f"{error}; give each target its own registry and learner folder") from None
    adapter = read_provenance(registry.current_path()).adapter
    if adapter != cfg.draft.adapter:
        raise ValueError(
            f"{registry.current_path()} learned from requests of adapter {adapter!r}, but "
            "draft.adapter is "
            f"{cfg.draft.adapter!r} (empty: none): give each adapter its own "
            "registry and learner folder"
        )


def _require_fitting(draft: Path, cfg: LearnerConfig, target: TargetFolder) -> None:
    family = find_family(cfg.draft.family)
    # The layer in a quantised target may be unquantised, which its tensors show when they are read.
    if not family.is_in_target and (method := read_quantization(draft)):
        raise ValueError(
            f"{draft} is quantised ({method}), but training needs unquantised weights: set "
            "draft.initial to a draft with such weights"
        )
    if family.is_head:
        require_head(draft, family.name, target)
        if not family.is_in_target and (
            misfit := next(completeness(Pair.read(target, draft)), None)
        ):
            raise ValueError(f"draft.initial {draft} does not fit {target.name}: {misfit.problem}")
    else:
        check_same_tokenizer(target.tokenizer, load_tokenizer(draft))
    if family.trains_lm_head:
        require_own_head(draft, target.folder)


def open_stream(
    cfg: LearnerConfig, buffer: Buffer, vocab_size: int, now_s: Callable[[], float] = time.time
) -> StreamSource:
    from redraft.online.learning.stream import StreamSource  # nats-py is an extra

    return StreamSource(
        cfg.ingest, cfg.nats, cfg.stream, buffer, vocab_size, now_s, read_id(cfg.registry)
    )


def read_vocab_size(target: Path) -> int:
    return next(
        int(size)
        for section in text_sections(read_config(target))
        if (size := section.get("vocab_size"))
    )
