"""Drafts by name: what forecasts each, and what method of vLLM's serves it.

folder, hub name   its own draft steps (heads.families)   draft_model, eagle, eagle3, medusa, mtp; MLPSpeculator by none
`ngram`            the same lookup (eval.ngram)           ngram
`suffix`           nothing                                suffix
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig

from eval.ngram import Ngram
from eval.teacher_forced import Forecastable
from heads.artifact import fingerprint
from heads.check import Pair
from heads.check_families import METHODS
from heads.checkpoint import is_hub_name, load_tokenizer
from heads.draft import Batch, DraftStep, TargetSignal
from heads.families import family
from heads.standalone import StandaloneDraft
from heads.target import Target
from heads.tokenizers import check_same_tokenizer

LOOKUPS = ("ngram", "suffix")
SUFFIX_PACKAGE = "arctic_inference"
SAMPLED_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Whose drafts vLLM can draw from q; Medusa's and looked-up tokens are always taken with all mass on one."""

STEPS_KEY = {"medusa": "num_heads", "mlp_speculator": "num_stages"}
"""Where the families with a head for every token say how many those are."""

SampleMethod = Literal["greedy", "probabilistic"]


@dataclass(frozen=True, kw_only=True)
class NamedDraft:
    """A draft as the report calls it."""

    name: str
    source: str
    """Folder, hub name, `ngram` or `suffix`."""
    family: str
    fingerprint: str
    forecast: Forecastable | None
    """None where there is nothing to forecast it with."""
    speculative: Mapping[str, Any] | None
    """vLLM's speculative config but for the number of tokens; None where vLLM has no proposer for it."""
    folder: Path | None = None
    """Where its weights lie; None for a lookup."""
    served: Path | None = None
    """The folder that is served with the draft where it is not the target's own, because the draft lies in it."""
    notes: tuple[str, ...] = ()

    def serves(self, num_speculative_tokens: int) -> bool:
        most = self.forecast.max_tokens if self.forecast else None
        return most is None or num_speculative_tokens <= most


@dataclass(frozen=True, kw_only=True)
class LoadedTarget:
    name: str
    folder: Path
    fingerprint: str
    model: Any
    tokenizer: Any


def load_drafts(
    named: Sequence[str], target: LoadedTarget, ngram: Ngram, sampling: SampleMethod, most_tokens: int
) -> list[NamedDraft]:
    """The drafts of `SOURCE` or `NAME=SOURCE` each, ready to propose up to `most_tokens`, on the target's device.

    Raises: ValueError, FileNotFoundError where one is no draft of this target, or two have one name.
    """
    parts = [_name_and_source(text) for text in named]
    _require_distinct([name for name, _ in parts])
    return [_load(name, source, target, ngram, sampling, most_tokens) for name, source in parts]


def _name_and_source(text: str) -> tuple[str, str]:
    """`NAME=SOURCE` in two; a folder is called by its last part that says something (a run's is not its `draft`)."""
    name, separator, source = text.partition("=")
    if separator and not Path(text).exists():
        return name, source
    path = Path(text)
    return (path.resolve().parent.name if path.name == "draft" else path.name or path.resolve().name), text


def _require_distinct(names: Sequence[str]) -> None:
    if not names:
        raise ValueError("no draft to evaluate: give --draft FOLDER, or --draft ngram")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ValueError(f"two drafts are called {twice}: tell them apart as --draft NAME=FOLDER")


def _load(
    name: str, source: str, target: LoadedTarget, ngram: Ngram, sampling: SampleMethod, most_tokens: int
) -> NamedDraft:
    if source == "ngram":
        print_ = f"ngram-{ngram.min}-{ngram.max}"
        return NamedDraft(
            name=name,
            source=source,
            family=source,
            fingerprint=print_,
            forecast=Forecastable(fingerprint=print_, steps=ngram),
            speculative=ngram.speculative_config,
        )
    if source == "suffix":
        return _suffix(name)
    folder = draft_folder(source, LOOKUPS)
    pair = Pair.read(target.folder, folder)
    _require_target(pair, target)
    method = METHODS.get(pair.family)
    is_sampled = sampling == "probabilistic" and method in SAMPLED_METHODS
    return NamedDraft(
        name=name,
        source=source,
        family=pair.family,
        folder=folder,
        fingerprint=fingerprint(folder),
        forecast=_standalone(pair, target, is_sampled)
        if pair.family == "standalone"
        else _head(pair, target, is_sampled, most_tokens),
        speculative=_served(pair, method, sampling),
        served=folder if pair.family == "mtp" and not pair.is_own_target else None,
        notes=_notes(pair, sampling),
    )


def _suffix(name: str) -> NamedDraft:
    """Raises: ValueError where what vLLM runs it with is not installed."""
    if importlib.util.find_spec(SUFFIX_PACKAGE) is None:
        raise ValueError("suffix decoding needs a package of its own: pip install arctic-inference==0.1.1")
    note = "measured in the engine only, on what each request itself holds: not on earlier answers, which serving keeps"
    served = {"method": "suffix"}
    return NamedDraft(
        name=name, source="suffix", family="suffix", fingerprint="suffix", forecast=None, speculative=served,
        notes=(note,),
    )  # fmt: skip


def draft_folder(source: str, others: Sequence[str]) -> Path:
    """The draft's folder, fetched from the hub where it is a hub name; `others` are what could be given instead.

    Raises: FileNotFoundError.
    """
    if not is_hub_name(source):
        if not Path(source).is_dir():
            raise FileNotFoundError(f"there is no draft {source}: give a folder, a hub name or {' or '.join(others)}")
        return Path(source)
    try:
        return Path(snapshot_download(source))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(f"{source} is neither a folder here nor to be had from the hub") from error


def _require_target(pair: Pair, target: LoadedTarget) -> None:
    """Return where a head was trained for this target, as far as it says.

    Raises: ValueError.
    """
    provenance = pair.provenance or {}
    trained_for = provenance.get("target_fingerprint")
    if pair.family != "standalone" and trained_for not in (None, target.fingerprint):
        raise ValueError(
            f"{pair.draft} was trained for another target than {target.name}: {provenance.get('target', 'unnamed')}"
        )


def _standalone(pair: Pair, target: LoadedTarget, is_sampled: bool) -> Forecastable:
    if any(pair.draft.glob("*token*")):
        check_same_tokenizer(target.tokenizer, load_tokenizer(pair.draft))
    draft = StandaloneDraft.load(pair.draft, target.model.dtype).to(target.model.device).eval()
    rows, theirs = (len(model.get_output_embeddings().weight) for model in (draft.model, target.model))
    if rows != theirs:
        raise ValueError(f"{pair.draft} has {rows} logits and the target {theirs}: an engine refuses the pair")
    return Forecastable(
        fingerprint=fingerprint(pair.draft),
        steps=draft.draft_steps,
        is_autoregressive=True,
        is_sampled=is_sampled,
        module=draft,
    )


def _head(pair: Pair, target: LoadedTarget, is_sampled: bool, most_tokens: int) -> Forecastable:
    heads_target = Target.of(target.model)
    if pair.family == "mtp":  # its layout stands in the config of the folder that holds it, which is a target's too
        config = AutoConfig.from_pretrained(pair.draft).get_text_config()
        heads_target = Target(config=config, embed_VD=heads_target.embed_VD, head_VD=heads_target.head_VD)
    head = family(pair.family).head.load(pair.draft, heads_target)
    head = head.to(target.model.device, target.model.dtype).eval()
    return Forecastable(
        fingerprint=fingerprint(pair.draft),
        steps=_steps(head, pair.family, most_tokens),
        aux_layer_ids=tuple(head.aux_layer_ids),
        is_sampled=is_sampled,
        max_tokens=_num_steps(head, pair.family),
        module=head,
    )


def _num_steps(head: Any, family: str) -> int | None:
    """Tokens that a head can draft; None for one that feeds on its own features as long as it is asked."""
    return getattr(head.config, STEPS_KEY[family]) if family in STEPS_KEY else None


def _steps(head: Any, family: str, most_tokens: int) -> Callable[[Batch, TargetSignal], list[DraftStep]]:
    def unrolled(batch: Batch, signal: TargetSignal) -> list[DraftStep]:
        steps: list[DraftStep] = head.draft_steps(batch, signal, most_tokens)
        return steps

    return head.draft_steps if family in STEPS_KEY else unrolled


def _served(pair: Pair, method: str | None, sampling: SampleMethod) -> dict[str, Any] | None:
    if method is None:
        return None
    served: dict[str, Any] = {"method": method}
    if pair.family != "mtp":
        served["model"] = str(pair.draft.absolute())
    if sampling == "probabilistic" and method in SAMPLED_METHODS:
        served["draft_sample_method"] = sampling
    return served


def _notes(pair: Pair, sampling: SampleMethod) -> tuple[str, ...]:
    if pair.family not in METHODS:
        return ("vLLM has no proposer for it, so it is forecast only",)
    if sampling == "probabilistic" and METHODS[pair.family] not in SAMPLED_METHODS:
        return (f"{METHODS[pair.family]} drafts are greedy whatever --draft-sample-method says",)
    return ()
