"""Which domain a request is of: what its label says, else the model it asks for, else what its text is like.

    X-Redraft-Domain: code ─ absent ─► "model": "llama-code" ─ no alias ─► clusters of prompts ─ not fitted ─► none

Clusters are k-means over hashed character trigrams: they need neither labels nor a model, work in any script, and take
a twentieth of a millisecond a prompt. On disk they are a published folder of centroids.safetensors and domains.json.
(scikit-learn has both pieces, but where it is installed transformers loads all of it: seconds in every process of a
server.)

N = prompts, C = clusters, F = hashed features
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heads import artifact
from online.request_origin import Origin, is_label

CHARS_OF_A_MESSAGE = 256
CHARS_OF_A_PROMPT = 512
"""Read from the beginning, so that a conversation stays where its prefix is cached; and of every message at most the
first, so that a long system prompt leaves room for the question behind it."""

NUM_FEATURES = 4096
FEATURES = f"trigrams of words, present or absent, hashed by 32-bit products to {NUM_FEATURES}"
"""Not counted: the words that a kind of request has in common weigh more than how long it is."""

FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)
"""Of a trigram's code points: large odd numbers, whose products differ in their highest bits."""

HASH_SHIFT = 32 - (NUM_FEATURES - 1).bit_length()

BLANK = ord(" ")

MAX_PROMPTS = 4096
"""That k-means sees, drawn at random: more of them move no centroid."""

CHUNK_PROMPTS = 1024
"""Whose features lie in memory at once."""

RESTARTS = 5
"""Of k-means, of which the best is taken."""

CENTROIDS, SETTINGS = "centroids.safetensors", "domains.json"

TOKENS = range(1 << 32)
"""What a tokenizer takes for an id; what it has no token for is nothing."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Domains:
    """How requests are told apart; by their label alone where nothing is given."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Domain by the name of a model that clients ask for."""
    clusters: Clusters | None = None
    decode: Decode | None = None
    """Text of token ids, for prompts that come as these."""

    def of(self, origin: Origin, question: Any) -> str:
        """The domain of a request whose JSON is `question`; empty where nothing tells."""
        if origin.domain or not isinstance(question, dict):
            return origin.domain
        if alias := self.aliases.get(str(question.get("model"))):
            return alias
        text = prompt_text(question, self.decode) if self.clusters else ""
        return self.clusters.of([text])[0] if self.clusters and text else ""


def prompt_text(question: Mapping[str, Any], decode: Decode | None = None) -> str:
    """The beginning of what is asked, of a completion or a chat; empty where that is no text."""
    if isinstance(messages := question.get("messages"), list) and messages:
        contents = [_content(message)[:CHARS_OF_A_MESSAGE] for message in messages if isinstance(message, dict)]
        return "\n".join(contents)[:CHARS_OF_A_PROMPT]
    prompt = question.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
        prompt = prompt[0]
    if isinstance(prompt, list) and decode and all(isinstance(token, int) and token in TOKENS for token in prompt):
        prompt = decode(prompt[:CHARS_OF_A_PROMPT])
    return prompt[:CHARS_OF_A_PROMPT] if isinstance(prompt, str) else ""


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def token_decoder(target: Path) -> Decode:
    """What turns token ids of this model into text, without special tokens.

    Raises: FileNotFoundError, ValueError.
    """
    from tokenizers import Tokenizer  # transformers would load torch

    path = target / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: prompts of token ids can not be read without it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    return lambda ids: str(tokenizer.decode(ids))


@dataclass(frozen=True)
class Clusters:
    """Kinds of prompts: a name and a centroid of each."""

    names: tuple[str, ...]
    centroids_CF: NDArray[np.float32]

    @classmethod
    def fit(cls, texts: Sequence[str], num_clusters: int, *, seed: int = 0) -> Clusters:
        """The clusters of these prompts, the largest first, named domain-0, domain-1, ...

        Raises: ValueError where there are fewer different prompts than clusters.
        """
        from scipy.cluster.vq import kmeans2  # an extra, and only fitting needs it

        if not 2 <= num_clusters <= len(set(texts)):
            raise ValueError(
                f"{num_clusters} domains can not be made of {len(set(texts))} different prompts: "
                "they are 2 at least, and no more than there are prompts"
            )
        rng = np.random.default_rng(seed)
        features_NF = features([texts[i] for i in rng.permutation(len(texts))[:MAX_PROMPTS]])
        with warnings.catch_warnings(action="ignore"):  # of a start that left a cluster empty: another will be better
            found = [kmeans2(features_NF, num_clusters, iter=20, minit="++", rng=rng) for _ in range(RESTARTS)]
        centroids_CF, clusters_N = min(found, key=lambda one: float(((features_NF - one[0][one[1]]) ** 2).sum()))
        by_size_C = np.argsort(-np.bincount(clusters_N, minlength=num_clusters), kind="stable")
        names = tuple(f"domain-{number}" for number in range(num_clusters))
        return cls(names, centroids_CF[by_size_C].astype(np.float32))

    def named_after(self, texts: Sequence[str], labels: Sequence[str]) -> Clusters:
        """The same, each under the label that most of its prompts have, where it can be called so and no other is."""
        found = list(zip(self.of(texts), labels, strict=True))
        commonest = {name: _commonest([label for cluster, label in found if cluster == name]) for name in self.names}
        times = Counter(commonest.values())
        fit = {name for name, label in commonest.items() if label and is_label(label) and times[label] == 1}
        return Clusters(tuple(commonest[name] if name in fit else name for name in self.names), self.centroids_CF)

    def of(self, texts: Sequence[str]) -> list[str]:
        """The name of the cluster that each prompt lies nearest to."""
        return [self.names[cluster] for cluster in self.distances(texts).argmin(1)]

    def distances(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Squared distance of every prompt to every centroid, less the prompts' own squared length (1), [N, C]."""
        chunks = (texts[first : first + CHUNK_PROMPTS] for first in range(0, len(texts), CHUNK_PROMPTS))
        return np.concatenate([self._squares - 2 * (features(chunk) @ self.centroids_CF.T) for chunk in chunks])

    @cached_property
    def _squares(self) -> NDArray[np.float32]:
        squares_C: NDArray[np.float32] = (self.centroids_CF**2).sum(1)
        return squares_C

    def write(self, folder: Path) -> None:
        """Into a folder that is being published."""
        save_file({"centroids": np.ascontiguousarray(self.centroids_CF)}, folder / CENTROIDS)
        (folder / SETTINGS).write_text(json.dumps({"names": self.names, "features": FEATURES}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Clusters:
        """What was published there.

        Raises: FileNotFoundError where nothing was; ValueError for a damaged file, or one of another release.
        """
        artifact.verify(folder)
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            names, made_of = tuple(map(str, settings["names"])), settings["features"]
            centroids_CF = load_file(folder / CENTROIDS)["centroids"]
        except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            raise ValueError(f"{folder} holds no domains ({error!r}): make them with redraft domains") from error
        if made_of != FEATURES or centroids_CF.shape != (len(names), NUM_FEATURES) or len(set(names)) < 2:
            raise ValueError(f"{folder} was made for other features than this release's: make it with redraft domains")
        return cls(names, centroids_CF)


def features(texts: Sequence[str]) -> NDArray[np.float32]:
    """Which trigrams each text's words have, a blank before and behind every word, of length 1; [N, F]."""
    features_NF = np.zeros((len(texts), NUM_FEATURES), np.float32)
    for row_F, text in zip(features_NF, texts, strict=True):
        points_T = np.frombuffer(f" {' '.join(text.lower().split())} ".encode("utf-32-le", "surrogatepass"), np.uint32)
        begin_T, middle_T, end_T = points_T[:-2], points_T[1:-1], points_T[2:]
        hashed_T = begin_T * FACTORS[0] + middle_T * FACTORS[1] + end_T * FACTORS[2]
        row_F[hashed_T[middle_T != BLANK] >> HASH_SHIFT] = 1
    features_NF /= np.sqrt(np.maximum(features_NF.sum(1), 1))[:, None]
    return features_NF


def _commonest(labels: Sequence[str]) -> str:
    return Counter(labels).most_common(1)[0][0] if labels else ""
