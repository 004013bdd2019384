"""Load drafts by name or folder: the forecast of each, and vLLM's config for serving it.

draft              forecast                                     vLLM's method
folder, hub name   the draft's steps                            the family's (`heads.catalog`), if there is one
`ngram`            the same lookup (`eval.forecast.ngram`)      ngram
counted answers    the same lookup (`redraft data count`)       ngram, with `engine.lookups`
`ngram+FOLDER`     the lookup, else the draft                   the draft's (`engine.lookup_first`)
`ANSWERS+FOLDER`   the same with counted answers                the same
`suffix`           none                                         suffix
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redraft.engine.hardware import this_machine
from redraft.engine.head_size import require_draft_heads
from redraft.eval.forecast.draft_source import DraftSource, SampleMethod
from redraft.eval.forecast.ngram import Lookup, Ngram
from redraft.eval.forecast.teacher_forced import Forecastable
from redraft.files.checkpoint import load_text_config, load_tokenizer
from redraft.files.folder import fingerprint
from redraft.files.tokenizers import check_same_tokenizer
from redraft.heads.catalog import require_trained_for
from redraft.heads.doctor.pair import Pair
from redraft.heads.draft import Batch, DraftStep, TargetSignal
from redraft.heads.families.retrieval import BEFORE_HEAD, Retrieval
from redraft.heads.family import Family
from redraft.heads.target import LoadedTarget


@dataclass(frozen=True, kw_only=True)
class NamedDraft:
    name: str
    source: str
    """Folder, hub name, `ngram`, `suffix` or a combination such as `ngram+FOLDER`."""
    family: str
    fingerprint: str
    forecast: Forecastable | None
    """The draft's forecast. None if the draft can be measured only in the engine."""
    speculative: Mapping[str, Any] | None
    """vLLM's speculative config without the number of tokens. None if vLLM has no such proposer."""
    folder: Path | None = None
    """Folder with the weights. None if the draft is a lookup."""
    served: Path | None = None
    """Folder to serve as the target, if the draft is in the target's folder."""
    notes: tuple[str, ...] = ()

    def serves(self, num_speculative_tokens: int) -> bool:
        most = self.forecast.max_tokens if self.forecast else None
        return most is None or num_speculative_tokens <= most


def load_drafts(
    named: Sequence[str], target: LoadedTarget, sampling: SampleMethod
) -> list[NamedDraft]:
    """Load the drafts with these names onto the target's device.

    Raises:
        FileNotFoundError
        ValueError: one of them is not a draft for this target, or two have the same name.
    """
    drafts = [DraftSource.parse(text) for text in named]
    _require_distinct([draft.name for draft in drafts])
    return [draft.load(target, sampling) for draft in drafts]


def _require_distinct(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("there is no draft to evaluate: give --draft FOLDER or --draft ngram")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"two drafts have the name {twice}: rename one with --draft NAME=FOLDER")


def make_model(draft: DraftSource, target: LoadedTarget, sampling: SampleMethod) -> NamedDraft:
    draft.require_layer(target.files.folder)
    folder = draft.folder or target.files.folder
    pair = Pair.read(target.files, folder)
    family = pair.family
    # A head is trained for one target. A standalone draft reads tokens, so `_make_forecast`
    # compares the tokenizers.
    if family.is_head:
        require_trained_for(folder, target.files)
    # vLLM finds such a draft in the target's folder.
    served = DraftSource(source=family.name) if family.is_in_target else draft
    return NamedDraft(
        name=draft.name,
        source=str(draft),
        family=family.name,
        folder=folder,
        fingerprint=fingerprint(folder),
        forecast=_make_forecast(pair, target, sampling == "probabilistic" and family.can_sample),
        speculative=served.speculative(sampling),
        served=folder if family.is_in_target and not pair.is_own_target else None,
        notes=_notes(family, sampling),
    )


def make_lookup(draft: DraftSource, target: LoadedTarget) -> NamedDraft:
    """A draft of n-grams or of counted answers."""
    ngram = Ngram()
    steps: Lookup = ngram
    identity = f"ngram-{ngram.min}-{ngram.max}"
    if (folder := draft.folder) is not None:
        require_trained_for(folder, target.files)
        steps, identity = Retrieval.read(folder), fingerprint(folder)
    return NamedDraft(
        name=draft.name,
        source=str(draft),
        family=draft.family.name,
        folder=folder,
        fingerprint=identity,
        forecast=Forecastable(fingerprint=identity, steps=steps),
        speculative=draft.speculative(),
    )


def make_mix(
    draft: DraftSource, lookup: NamedDraft, head: NamedDraft, sampling: SampleMethod
) -> NamedDraft:
    """A draft that tries the lookup first and then the head.

    Raises:
        ValueError: this draft does not support a preceding lookup.
    """
    assert lookup.forecast is not None
    assert isinstance(lookup.forecast.steps, Lookup)
    first, identity = lookup.forecast.steps, lookup.fingerprint
    if isinstance(first, Retrieval):
        identity = f"{identity}-{BEFORE_HEAD}"
        first = copy(first)
        first.least_first = BEFORE_HEAD
    speculative = draft.speculative(sampling)
    assert head.forecast is not None, "a head has one"
    tokens = draft.head_tokens
    identity = f"{identity}+{head.fingerprint}:{tokens}"
    return replace(
        head,
        name=draft.name,
        source=str(draft),
        family=str(replace(draft, lookup=lookup.family, source=head.family)),
        fingerprint=identity,
        forecast=replace(head.forecast, fingerprint=identity, first=first, head_tokens=tokens),
        speculative=speculative,
    )


def make_suffix(draft: DraftSource) -> NamedDraft:
    """A suffix-decoding draft. Raises ValueError if the package that vLLM needs is missing."""
    draft.require_package()
    note = (
        "measured only in the engine, and only with the text of each request: a server "
        "would also look tokens up in its earlier answers"
    )
    return NamedDraft(
        name=draft.name,
        source=str(draft),
        family="suffix",
        fingerprint="suffix",
        forecast=None,
        speculative=draft.speculative(),
        notes=(note,),
    )


def _make_forecast(pair: Pair, target: LoadedTarget, is_sampled: bool) -> Forecastable:
    # A draft without a tokenizer cannot be compared, but the number of logits is checked below.
    if not pair.family.is_head and any(pair.draft.glob("*token*")):
        check_same_tokenizer(target.files.tokenizer, load_tokenizer(pair.draft))
    if target.model.device.type == "cuda":
        config = target.files.text_config if pair.family.is_head else load_text_config(pair.draft)
        require_draft_heads(
            pair.family, f"the draft {pair.draft}", config, target.model.dtype, this_machine()
        )
    draft = pair.family.load(pair.draft, lambda: target.borrowed, target.model.dtype)
    draft = draft.to(target.model.device).eval()
    if not pair.family.is_head:
        _require_rows(pair.draft, draft.model, target.model)

    def steps(batch: Batch, signal: TargetSignal, num_tokens: int) -> list[DraftStep]:
        computed: list[DraftStep] = draft.draft_steps(batch, signal, num_tokens)
        return computed

    return Forecastable(
        fingerprint=fingerprint(pair.draft),
        steps=steps,
        is_autoregressive=draft.is_autoregressive,
        is_block=draft.is_block,
        aux_layer_ids=draft.aux_layer_ids,
        is_sampled=is_sampled,
        can_sample=pair.family.can_sample,
        max_tokens=draft.max_tokens,
        module=draft,
    )


def _require_rows(folder: Path, draft: Any, target: Any) -> None:
    """Raise ValueError unless both causal LMs have the same number of logits."""
    rows, its = (len(model.get_output_embeddings().weight) for model in (draft, target))
    if rows != its:
        raise ValueError(
            f"{folder} has {rows} logits, but the target has {its}: engines reject this pair"
        )


def _notes(family: Family, sampling: SampleMethod) -> tuple[str, ...]:
    if sampling == "probabilistic" and not family.can_sample:
        return (
            f"{family.method} drafts are always greedy, whatever the value of --draft-sample-method",
        )
    return ()
