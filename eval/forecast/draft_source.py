"""Parse a draft's name on the command line: its kind, and how vLLM serves it.

    DRAFT            a folder or hub name: a head, a draft model, counted answers (`redraft data count`)
    ngram, suffix    a lookup in the text, without a folder
    live             a lookup in the text and in this server's earlier answers, counted
    mtp              the layers in the target's own folder
    ngram+HEAD:2     n-grams first, then a head with at most 2 draft tokens per step
    ANSWERS+HEAD:2   counted answers (or live) first
    NAME=DRAFT       any of these, under a name for reports

A folder is recognised by its tensors, because its config.json may name a different family. This
module imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redraft.engine.lookup_first import HeadLimits, mix
from redraft.eval.forecast.ngram import Ngram
from redraft.files.folder import (
    CONFIG,
    OLD_WEIGHTS,
    fetch_model,
    is_hub_name,
    open_folder,
    read_config,
    refuse_gguf,
    tensor_files,
    text_sections,
)
from redraft.files.foreign import match_foreign
from redraft.heads.catalog import FAMILIES, detect_family, find_method, list_methods, match_tensors
from redraft.heads.families.retrieval import LIVE, MEASURE_COUNTED, Retrieval, is_retrieval
from redraft.heads.family import NUM_TOKENS, Family

if TYPE_CHECKING:
    from redraft.eval.forecast.drafts import NamedDraft
    from redraft.heads.target import LoadedTarget

# Proposes the most probable token, or a token sampled from q.
SampleMethod = Literal["greedy", "probabilistic"]


def require_tokens(num_speculative_tokens: int) -> None:
    """Raise ValueError for a server with 0 draft tokens, which vLLM would refuse after a minute."""
    if num_speculative_tokens < 1:
        raise ValueError(
            f"--num-speculative-tokens {num_speculative_tokens} proposes no tokens: give 1 or more, or "
            "start vLLM without a draft (vllm serve)"
        )


MEASURED_TOKENS = (NUM_TOKENS, 1, 2, 5)

NGRAM = "ngram"
SUFFIX_PACKAGE = "arctic_inference"  # Package for vLLM's suffix decoding.
NAMED = re.compile(r"([^=/+]+)=(.+)")

WHOLE_MODEL = re.compile(r"(?!mtp\.)(\w+\.)*layers\.0\..*")
"""Pattern of a tensor in a model's first layer. An MTP layer in a separate folder has no such name.
"""

MTP_TENSOR, IN_LAYER = re.compile(r"(?i)mtp|nextn|eh_proj"), re.compile(r"\blayers\.(\d+)\.")
"""Names of tensors in MTP layers, and in a numbered layer."""

CAUSAL_LM = re.compile(r"\w+(ForCausalLM|LMHeadModel)")


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """How tokens are looked up, alone or before a head."""

    verify_cost: float | None = None
    """Cost of verifying one more token, for counted answers. If None, the value stored in their
    folder is used.
    """
    head_requests: int | None = None
    """Maximum batch size at which the head drafts. None means no limit."""


@dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft by name.

    With `lookup`, the draft is a head that drafts if the lookup finds nothing.
    """

    source: str
    """Folder, hub name, or name of a draft without a folder. With `lookup`, it names the head."""
    lookup: str | None = None
    """The lookup before the head: `ngram`, `live`, or the folder of counted answers."""
    head_tokens: int | None = None
    """Maximum number of draft tokens from the head per step. If None, it is the same as for the
    lookup.
    """
    given_name: str | None = None

    @staticmethod
    def parse(text: str, lookups: Collection[str] = ()) -> DraftSource:
        """Parse what `str` writes, and also `NAME=DRAFT`.

        At most, it opens a folder before a plus sign.
        """
        name = None if Path(text).exists() else NAMED.fullmatch(text)
        if name:
            return replace(DraftSource.parse(name[2], lookups), given_name=name[1])
        # A path may contain plus signs, so try all of them.
        for plus in re.finditer(r"\+", text):
            lookup, head = (
                text[: plus.start()],
                re.fullmatch(r"(.+?)(?::(\d+))?", text[plus.end() :]),
            )
            if head and (lookup in (NGRAM, LIVE, *lookups) or is_retrieval(lookup)):
                tokens = int(head[2]) if head[2] else None
                return DraftSource(source=head[1], lookup=lookup, head_tokens=tokens)
        return DraftSource(source=text)

    def __str__(self) -> str:
        return self._spell(self.lookup, self.source)

    @property
    def name(self) -> str:
        """Return the name for reports: the given name, or else the folder's.

        If the folder is called `draft`, it is the name of its run.
        """
        return self.given_name or self._spell(
            self.lookup and _shorten(self.lookup), _shorten(self.source)
        )

    def _spell(self, lookup: str | None, head: str) -> str:
        limit = "" if self.head_tokens is None else f":{self.head_tokens}"
        return head if lookup is None else f"{lookup}+{head}{limit}"

    @cached_property
    def parts(self) -> tuple[DraftSource, DraftSource]:
        assert self.lookup is not None
        return DraftSource(source=self.lookup), DraftSource(source=self.source)

    def require_package(self) -> None:
        """Raise ValueError if the package that vLLM needs for suffix decoding is missing."""
        if self.source == "suffix" and importlib.util.find_spec(SUFFIX_PACKAGE) is None:
            raise ValueError(
                "suffix decoding needs a separate package: pip install arctic-inference==0.1.1"
            )

    def require_layer(self, target: str | Path) -> None:
        """Raise ValueError for `mtp` if the target's files contain no MTP layer.

        vLLM would report it only after minutes of loading, or not at all.
        """
        if not self.is_without_folder or self.is_lookup:
            return
        try:
            folder = open_folder(target)
            names, sections = tensor_files(folder), text_sections(read_config(folder))
        except FileNotFoundError:  # vLLM will download the files, or report the error
            return
        numbers = [section.get("num_hidden_layers") or 0 for section in sections]
        beyond = (int(layer[1]) for name in names if (layer := IN_LAYER.search(name)))
        # DeepSeek's and GLM's MTP layers follow the target's layers.
        if any(map(MTP_TENSOR.search, names)) or any(number >= max(numbers) for number in beyond):
            return
        raise ValueError(
            f"{target} contains no MTP layer, which a quantised copy may leave out: choose a different "
            "--draft, or a copy of the target that has the layer"
        )

    @property
    def is_without_folder(self) -> bool:
        """Whether this is a lookup in the text, or the layers in the target's own folder."""
        # ./ngram means a folder with this name.
        return self.source in list_without_folder()

    @cached_property
    def folder(self) -> Path | None:
        """Return the draft's or head's folder, downloaded if it is on the hub. None if it has none.

        Raises:
            FileNotFoundError: the folder does not exist, or the hub does not provide it.
            ValueError: the name is a GGUF file.
        """
        if self.is_without_folder:
            return None
        refuse_gguf(self.source)
        if not is_hub_name(self.source) and not Path(self.source).is_dir():
            names = " or ".join(list_without_folder())
            raise FileNotFoundError(
                f"there is no draft {self.source}: give a folder, a hub name, {names}"
            )
        folder = fetch_model(self.source)
        # A registry's `current` may change while vLLM loads.
        return folder.resolve() if folder.is_symlink() else folder

    @cached_property
    def is_answers(self) -> bool:
        return self.folder is not None and is_retrieval(self.folder)

    @property
    def is_lookup(self) -> bool:
        """Whether this is a lookup without a model."""
        return self.is_answers or (self.is_without_folder and not self.family.is_in_target)

    @property
    def has_answers(self) -> bool:
        return self.is_answers or self.source == LIVE or self.lookup not in (None, NGRAM)

    @cached_property
    def family(self) -> Family:
        """Return the family of the draft or head.

        Raises:
            FileNotFoundError: there is no such draft.
            ValueError: redraft has no module for it; the message names its layout.
        """
        if self.folder is None:
            return next(family for family in FAMILIES if family.name == self.source)
        return detect_family(self.folder)

    def speculative(
        self,
        sampling: SampleMethod = "greedy",
        lookups: Lookups | None = None,
        *,
        method: str | None = None,
    ) -> dict[str, Any]:
        """vLLM's --speculative-config, without the number of tokens.

        A draft that cannot be sampled is greedy regardless of `sampling`. `method` overrides the
        method inferred from the draft's tensors. A draft for which redraft has no module can also
        be served.

        Raises:
            FileNotFoundError: there is no such draft.
            ValueError: vLLM cannot serve it next to a target.
        """
        lookups = lookups or Lookups()
        if self.lookup is not None:
            first = _look_up(self.lookup, lookups)
            limits = HeadLimits(tokens=self.head_tokens, requests=lookups.head_requests)
            return mix(first, self.parts[1].speculative(sampling, method=method), limits)
        if self.source in (NGRAM, LIVE) or self.is_answers:
            return _look_up(self.source, lookups)
        if self.folder is None:
            chosen = {"method": self.source}
        else:
            # Keep a hub name, so that readers of a report can use it.
            model = self.source if is_hub_name(self.source) else str(self.folder.absolute())
            chosen = {
                "model": model,
                **({"method": method} if method else choose_proposer(self.folder)),
            }
        family = find_method(chosen["method"])
        can_sample = family is not None and family.can_sample
        return (
            {**chosen, "draft_sample_method": sampling}
            if can_sample and sampling == "probabilistic"
            else chosen
        )

    def load(self, target: LoadedTarget, sampling: SampleMethod) -> NamedDraft:
        """Load the draft with its forecast onto the target's device.

        Raises:
            FileNotFoundError
            ValueError: it is not a draft for this target, or it depends on a server.
        """
        from redraft.eval.forecast import drafts  # loads torch

        if self.lookup is not None:
            lookup, head = (part.load(target, sampling) for part in self.parts)
            return drafts.make_mix(self, lookup, head, sampling)
        if self.source == LIVE:
            raise ValueError(f"{LIVE} depends on a server's earlier answers: {MEASURE_COUNTED}")
        if self.source == NGRAM or self.is_answers:
            return drafts.make_lookup(self, target)
        return (
            drafts.make_suffix(self)
            if self.is_lookup
            else drafts.make_model(self, target, sampling)
        )


def list_without_folder() -> list[str]:
    return [
        family.name
        for family in FAMILIES
        if (family.is_lookup and not family.tensors) or family.is_in_target
    ]


def _shorten(source: str) -> str:
    # Reports are also read elsewhere, so only a folder that exists here is resolved.
    path = Path(source).absolute() if Path(source).is_dir() else Path(source)
    return path.parent.name if path.name == "draft" and path.parent.name else path.name or source


def _look_up(lookup: str, lookups: Lookups) -> dict[str, Any]:
    if lookup == NGRAM:
        return Ngram().speculative_config
    folder = lookup if lookup == LIVE else fetch_model(lookup)
    return Retrieval.speculative_config(folder, verify_cost=lookups.verify_cost)


def choose_proposer(folder: Path) -> dict[str, Any]:
    """Return vLLM's method for a draft's folder, and its flags.

    They are inferred from the tensors or from config.json.

    Raises:
        FileNotFoundError: the folder has no weights.
        ValueError: vLLM has no proposer for it.
    """
    config = read_config(folder) if (folder / CONFIG).is_file() else {}
    names = _tensor_names(folder)
    if (foreign := match_foreign(config, names)) is not None:
        if foreign.method is None:
            detect_family(folder)  # raises an error that names the kind
        return {"method": foreign.method}
    named = set(config.get("architectures") or ())
    of_architecture = (family for family in FAMILIES if named.intersection(family.architectures))
    family = match_tensors(names) or next(of_architecture, None)
    if family is None:
        return {"method": _guess_method(config) or detect_family(folder).method}
    if family.is_in_target and any(WHOLE_MODEL.fullmatch(name) for name in names):
        raise ValueError(
            f"{folder} is a target that contains its {family.title} layer: serve it as the target, "
            f"with --draft {family.name}"
        )
    return family.speculative


def _tensor_names(folder: Path) -> Collection[str]:
    if any(folder.glob("*.safetensors")) or not any(folder.glob(OLD_WEIGHTS)):
        return tensor_files(folder)
    # Imported here, because it imports torch, which old weight files need.
    from redraft.files.tensors import list_tensors

    return list_tensors(folder)


def _guess_method(config: Mapping[str, Any]) -> str | None:
    """Return the method whose name occurs in the architecture or model type.

    For any other causal LM, it is `draft_model`.
    """
    architectures = config.get("architectures") or []
    names = " ".join([*architectures, config.get("model_type") or ""]).lower()
    # Check longer names first, because "eagle" is part of "eagle3".
    for method in sorted(list_methods(), key=len, reverse=True):
        if method in names:
            return method
    return "draft_model" if any(map(CAUSAL_LM.fullmatch, architectures)) else None
