"""Drafts by name or folder: the forecast of each, and vLLM's config for serving it.

draft              forecast                                     vLLM's method
folder, hub name   the draft's steps                            the family's (`heads.catalog`), if there is one
`ngram`            the same lookup (`eval.forecast.ngram`)      ngram
counted answers    the same lookup (`redraft retrieval`)        ngram, with `eval.engine.lookups`
`ngram+FOLDER`     the lookup, and the draft if it finds none   the draft's (`eval.engine.lookup_first`)
`ANSWERS+FOLDER`   the same with counted answers                the same
`suffix`           none                                         suffix
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from redraft.eval.engine.lookup_first import HeadLimits, mix
from redraft.eval.forecast.ngram import Lookup, Mix, Ngram
from redraft.eval.forecast.teacher_forced import Forecastable
from redraft.heads.catalog import list_lookups
from redraft.heads.doctor.pair import Pair, read_provenance
from redraft.heads.draft import Batch, DraftStep, TargetSignal
from redraft.heads.families.retrieval import BEFORE_HEAD, LEAST_FIRST, Retrieval, is_retrieval
from redraft.heads.family import Family
from redraft.heads.files.artifact import fingerprint
from redraft.heads.files.checkpoint import load_tokenizer
from redraft.heads.files.folder import is_hub_name
from redraft.heads.files.tokenizers import check_same_tokenizer
from redraft.heads.target import Target

SUFFIX_PACKAGE = "arctic_inference"
"""Package for vLLM's suffix decoding."""

SampleMethod = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, kw_only=True)
class NamedDraft:
    """A draft with a name for the report."""

    name: str
    source: str
    """Folder, hub name, `ngram`, `suffix` or a mix such as `ngram+FOLDER`."""
    family: str
    fingerprint: str
    forecast: Forecastable | None
    """None if it can only be measured in the engine."""
    speculative: Mapping[str, Any] | None
    """vLLM's speculative config without the number of tokens; None if vLLM has no proposer for it."""
    folder: Path | None = None
    """The folder with the weights; None for a lookup."""
    served: Path | None = None
    """The folder to serve as the target, if the draft lies in one and it is not the given target's."""
    notes: tuple[str, ...] = ()

    def serves(self, num_speculative_tokens: int) -> bool:
        """True if the draft can propose so many tokens."""
        most = self.forecast.max_tokens if self.forecast else None
        return most is None or num_speculative_tokens <= most


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    name: str
    folder: Path
    fingerprint: str
    model: Any
    tokenizer: Any


def load_drafts(named: Sequence[str], target: LoadedTarget, ngram: Ngram, sampling: SampleMethod) -> list[NamedDraft]:
    """The drafts given as `SOURCE` or `NAME=SOURCE`, on the target's device.

    Raises:
        FileNotFoundError: there is no such draft.
        ValueError: it is not a draft of this target, or two drafts have one name.
    """
    parts = [_split_name(text) for text in named]
    _require_distinct([name for name, _ in parts])
    return [_load(name, source, target, ngram, sampling) for name, source in parts]


def _split_name(text: str) -> tuple[str, str]:
    """The name and the source of `NAME=SOURCE`. Without NAME, the folder's, or its run's if it is called `draft`."""
    name, separator, source = text.partition("=")
    # a folder may have an = in its name
    if separator and not Path(text).exists():
        return name, source
    if mixed := Mix.parse(text):
        lookup, head = (_split_name(part)[0] for part in (mixed.lookup, mixed.head))
        return str(replace(mixed, lookup=lookup, head=head)), text
    path = Path(text)
    return (path.resolve().parent.name if path.name == "draft" else path.name or path.resolve().name), text


def _require_distinct(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("no draft to evaluate: give --draft FOLDER, or --draft ngram")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"two drafts are called {twice}: tell them apart as --draft NAME=FOLDER")


def _load(name: str, source: str, target: LoadedTarget, ngram: Ngram, sampling: SampleMethod) -> NamedDraft:
    # Names before folders: ./ngram is a folder of this name.
    if source == "ngram":
        return _make_ngram(name, ngram)
    if source == "suffix":
        return _make_suffix(name)
    if mixed := Mix.parse(source):
        lookup, head = (_load(name, part, target, ngram, sampling) for part in (mixed.lookup, mixed.head))
        return _make_mix(name, mixed, lookup, head)
    folder = draft_folder(source, list_lookups())
    if is_retrieval(folder):
        _require_target(folder, read_provenance(folder), target)
        return _make_retrieval(name, folder)
    pair = Pair.read(target.folder, folder)
    family = pair.family
    # A head reads the hidden states of one target. A standalone draft reads tokens: `_make_forecast` compares
    # the tokenizers.
    if family.is_head:
        _require_target(folder, pair.provenance, target)
    return NamedDraft(
        name=name,
        source=source,
        family=family.name,
        folder=folder,
        fingerprint=fingerprint(folder),
        forecast=_make_forecast(pair, target, sampling == "probabilistic" and family.can_sample),
        speculative=_speculative_config(pair, sampling),
        served=folder if family.is_in_target and not pair.is_own_target else None,
        notes=_notes(family, sampling),
    )


def _identify(ngram: Ngram) -> str:
    return f"ngram-{ngram.min}-{ngram.max}"


def _make_ngram(name: str, ngram: Ngram) -> NamedDraft:
    identity = _identify(ngram)
    return NamedDraft(
        name=name,
        source="ngram",
        family="ngram",
        fingerprint=identity,
        forecast=Forecastable(fingerprint=identity, steps=ngram),
        speculative=ngram.speculative_config,
    )


def _make_retrieval(name: str, folder: Path) -> NamedDraft:
    identity = fingerprint(folder)
    return NamedDraft(
        name=name,
        source=str(folder),
        family="retrieval",
        folder=folder,
        fingerprint=identity,
        forecast=Forecastable(fingerprint=identity, steps=Retrieval.read(folder)),
        speculative=Retrieval.speculative_config(folder),
    )


def _make_mix(name: str, mixed: Mix, lookup: NamedDraft, head: NamedDraft) -> NamedDraft:
    """The lookup first, then the head. Raises ValueError if no lookup goes before this draft."""
    assert lookup.speculative is not None
    assert lookup.forecast is not None
    assert isinstance(lookup.forecast.steps, Lookup)
    config, first, identity = lookup.speculative, lookup.forecast.steps, lookup.fingerprint
    if isinstance(first, Retrieval):
        config, identity = {**config, LEAST_FIRST: BEFORE_HEAD}, f"{identity}-{BEFORE_HEAD}"
        first = Retrieval(first.config, first.entries, first.run_probability, least_first=BEFORE_HEAD)
    speculative = mix(config, head.speculative or {}, HeadLimits(tokens=mixed.head_tokens))
    assert head.forecast is not None, "a head has one"
    identity = f"{identity}+{head.fingerprint}:{mixed.head_tokens}"
    return replace(
        head,
        name=name,
        source=str(mixed),
        family=str(Mix(lookup=lookup.family, head=head.family)),
        fingerprint=identity,
        forecast=replace(head.forecast, fingerprint=identity, first=first, head_tokens=mixed.head_tokens),
        speculative=speculative,
    )


def _make_suffix(name: str) -> NamedDraft:
    """Raises ValueError if vLLM's package for it is not installed."""
    if importlib.util.find_spec(SUFFIX_PACKAGE) is None:
        raise ValueError("suffix decoding needs a separate package: pip install arctic-inference==0.1.1")
    note = (
        "measured in the engine only, and with the text of each request alone: a server would also look tokens up in "
        "its earlier answers"
    )
    return NamedDraft(
        name=name,
        source="suffix",
        family="suffix",
        fingerprint="suffix",
        forecast=None,
        speculative={"method": "suffix"},
        notes=(note,),
    )


def draft_folder(source: str, others: Sequence[str]) -> Path:
    """The draft's folder, downloaded if `source` is a hub name; `others` are named as alternatives in the error.

    Raises:
        FileNotFoundError: there is no such folder, here or on the hub.
    """
    if not is_hub_name(source):
        if not Path(source).is_dir():
            raise FileNotFoundError(f"there is no draft {source}: give a folder, a hub name or {' or '.join(others)}")
        return Path(source)
    try:
        return Path(snapshot_download(source))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{source} is not a folder here, and the hub does not give it") from error


def _require_target(draft: Path, provenance: Mapping[str, Any] | None, target: LoadedTarget) -> None:
    """Raise ValueError if the draft's provenance names another target."""
    provenance = provenance or {}
    # a head of another trainer names no target, and is taken at its word
    made_for = provenance.get("target_fingerprint")
    if made_for not in (None, target.fingerprint):
        raise ValueError(
            f"{draft} was trained for another target than {target.name}: {provenance.get('target', 'unnamed')}"
        )


def _make_forecast(pair: Pair, target: LoadedTarget, is_sampled: bool) -> Forecastable:
    # a draft without a tokenizer cannot be compared: the number of logits is checked below
    if not pair.family.is_head and any(pair.draft.glob("*token*")):
        check_same_tokenizer(target.tokenizer, load_tokenizer(pair.draft))
    draft = pair.family.load(pair.draft, lambda: Target.from_model(target.model), target.model.dtype)
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
        raise ValueError(f"{folder} has {rows} logits and the target {its}: an engine refuses the pair")


def _speculative_config(pair: Pair, sampling: SampleMethod) -> dict[str, Any] | None:
    family = pair.family
    if family.method is None:
        return None
    config = family.speculative
    if not family.is_in_target:
        config["model"] = str(pair.draft.absolute())
    if sampling == "probabilistic" and family.can_sample:
        config["draft_sample_method"] = sampling
    return config


def _notes(family: Family, sampling: SampleMethod) -> tuple[str, ...]:
    if family.method is None:
        return ("vLLM has no proposer for it, so it is forecast only",)
    if sampling == "probabilistic" and not family.can_sample:
        return (f"{family.method} drafts are greedy whatever --draft-sample-method says",)
    return ()
