"""Detecting the domain of a request: from the label, else from the model, else from the text.

    X-Redraft-Domain: code ─ absent ─► "model": "llama-code" ─ no alias ─► clusters of prompts ─ not
    fitted ─► none

Clusters are k-means over hashed character trigrams. They need neither labels nor a model, work in
any script, and take
0.05 ms per prompt. On disk they are a published folder of centroids.safetensors and domains.json.
(scikit-learn has
both pieces, but transformers imports all of it when it is installed: seconds in every process of a
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

from redraft.heads.files import artifact
from redraft.online.records.origin import Origin, is_label

CHARS_OF_A_MESSAGE = 256
CHARS_OF_A_PROMPT = 512
"""Characters read of each message and of the whole prompt. Read from the beginning: a growing
conversation then stays on the server with its prefix cached. Cut per message, to leave room for
the question after a long system prompt.
"""

NUM_FEATURES = 4096
FEATURES = f"trigrams of words, present or absent, hashed by 32-bit products to {NUM_FEATURES}"
"""Presence instead of counts: the common words of a kind of request then weigh more than the length
of the prompt.
"""

FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D], np.uint32)
"""Multipliers of a trigram's three code points: large odd numbers, whose products differ in the
highest bits.
"""

HASH_SHIFT = 32 - (NUM_FEATURES - 1).bit_length()
BLANK = ord(" ")
MAX_PROMPTS = 4096  # Sample of prompts for k-means: more would not move the centroids.
CHUNK_PROMPTS = 1024  # Prompts per chunk of features in memory.
RESTARTS = 5  # Runs of k-means, of which the best is kept.
CENTROIDS, SETTINGS = "centroids.safetensors", "domains.json"
TOKENS = range(1 << 32)  # Valid token ids for a tokenizer; ids without a token decode to nothing.

TokenDecoder = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Domains:
    """Rules for detecting a domain. Without aliases and clusters only the label counts."""

    aliases: Mapping[str, str] = field(default_factory=dict)  # by model name, as clients write it
    clusters: Clusters | None = None
    decode: TokenDecoder | None = None  # Turns token ids into text, for prompts sent as token ids.

    def detect(self, origin: Origin, payload: Any) -> str:
        if origin.domain or not isinstance(payload, dict):
            return origin.domain
        if alias := self.aliases.get(str(payload.get("model"))):
            return alias
        text = prompt_text(payload, self.decode) if self.clusters else ""
        return self.clusters.assign([text])[0] if self.clusters and text else ""


def prompt_text(payload: Mapping[str, Any], decode: TokenDecoder | None = None) -> str:
    """The beginning of the prompt of a completion, chat or response; empty if it is not text."""
    if isinstance(messages := payload.get("messages") or payload.get("input"), list) and messages:
        contents = [
            _content(message)[:CHARS_OF_A_MESSAGE]
            for message in messages
            if isinstance(message, dict)
        ]
        return "\n".join(contents)[:CHARS_OF_A_PROMPT]
    prompt = payload.get("prompt") or payload.get("input")
    if isinstance(prompt, list) and prompt and all(isinstance(part, str) for part in prompt):
        prompt = prompt[0]
    if (
        isinstance(prompt, list)
        and decode
        and all(isinstance(token, int) and token in TOKENS for token in prompt)
    ):
        prompt = decode(prompt[:CHARS_OF_A_PROMPT])
    return prompt[:CHARS_OF_A_PROMPT] if isinstance(prompt, str) else ""


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def load_token_decoder(target: Path) -> TokenDecoder:
    """A function from this model's token ids to text without special tokens.

    Raises:
        FileNotFoundError: if there is no tokenizer.json.
        ValueError: if it cannot be read.
    """
    from tokenizers import Tokenizer  # transformers would import torch

    path = target / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no {path}: it is needed to read prompts sent as token ids"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    return lambda ids: str(tokenizer.decode(ids))


@dataclass(frozen=True)
class Clusters:
    """Kinds of prompts: a name and a centroid for each."""

    names: tuple[str, ...]
    centroids_CF: NDArray[np.float32]

    @classmethod
    def fit(cls, texts: Sequence[str], num_clusters: int, *, seed: int = 0) -> Clusters:
        """Cluster these prompts.

        The largest cluster comes first, and they are named domain-0, domain-1, ...

        Raises:
            ValueError: if there are fewer distinct prompts than clusters.
        """
        from scipy.cluster.vq import kmeans2  # an extra, needed for fitting only

        if not 2 <= num_clusters <= len(set(texts)):
            raise ValueError(
                f"{num_clusters} domains cannot be made of {len(set(texts))} distinct prompts: "
                "ask for at least 2, and at most one per prompt"
            )
        rng = np.random.default_rng(seed)
        features_NF = features([texts[i] for i in rng.permutation(len(texts))[:MAX_PROMPTS]])
        with warnings.catch_warnings(
            action="ignore"
        ):  # about a run with an empty cluster: another run will be better
            found = [
                kmeans2(features_NF, num_clusters, iter=20, minit="++", rng=rng)
                for _ in range(RESTARTS)
            ]
        # Each run is (centroids [C, F], cluster of each prompt [N]). The best has the least squared
        # distance.
        centroids_CF, clusters_N = min(
            found, key=lambda one: float(((features_NF - one[0][one[1]]) ** 2).sum())
        )
        by_size_C = np.argsort(-np.bincount(clusters_N, minlength=num_clusters), kind="stable")
        names = tuple(f"domain-{number}" for number in range(num_clusters))
        return cls(names, centroids_CF[by_size_C].astype(np.float32))

    def named_after(self, texts: Sequence[str], labels: Sequence[str]) -> Clusters:
        """The same clusters, each named after its most common label if that is valid and unique."""
        found = list(zip(self.assign(texts), labels, strict=True))
        counts = {
            name: Counter(label for cluster, label in found if cluster == name)
            for name in self.names
        }
        commonest = {
            name: next(iter(count.most_common(1)), ("", 0))[0] for name, count in counts.items()
        }
        times = Counter(commonest.values())
        fit = {
            name
            for name, label in commonest.items()
            if label and is_label(label) and times[label] == 1
        }
        return Clusters(
            tuple(commonest[name] if name in fit else name for name in self.names),
            self.centroids_CF,
        )

    def assign(self, texts: Sequence[str]) -> list[str]:
        return [self.names[cluster] for cluster in self.distances(texts).argmin(1)]

    def distances(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Squared distance of every prompt to every centroid, minus 1 (the squared length of any
        prompt), [N, C].
        """
        chunks = (
            texts[first : first + CHUNK_PROMPTS] for first in range(0, len(texts), CHUNK_PROMPTS)
        )
        # |x - c|^2 = 1 - 2 x.c + |c|^2, without the 1, which changes no order.
        return np.concatenate(
            [self._squares - 2 * (features(chunk) @ self.centroids_CF.T) for chunk in chunks]
        )

    @cached_property
    def _squares(self) -> NDArray[np.float32]:
        squares_C: NDArray[np.float32] = (self.centroids_CF**2).sum(1)
        return squares_C

    def write(self, folder: Path) -> None:
        save_file({"centroids": np.ascontiguousarray(self.centroids_CF)}, folder / CENTROIDS)
        (folder / SETTINGS).write_text(
            json.dumps({"names": self.names, "features": FEATURES}, indent=2) + "\n"
        )

    @classmethod
    def read(cls, folder: Path) -> Clusters:
        """Read published clusters.

        Raises:
            FileNotFoundError
            ValueError: a file is damaged.
        """
        artifact.verify(folder)
        try:
            settings = json.loads((folder / SETTINGS).read_text())
            names, made_of = tuple(map(str, settings["names"])), settings["features"]
            centroids_CF = load_file(folder / CENTROIDS)["centroids"]
        except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
            raise ValueError(
                f"{folder} does not hold domains ({error!r}): make them with `redraft data domains`"
            ) from error
        if (
            made_of != FEATURES
            or centroids_CF.shape != (len(names), NUM_FEATURES)
            or len(set(names)) < 2
        ):
            raise ValueError(
                f"{folder} was made for other features than this release uses: run `redraft data "
                "domains` again"
            )
        return cls(names, centroids_CF)


def features(texts: Sequence[str]) -> NDArray[np.float32]:
    """Trigrams present in each text's words (a blank before and after every word), as vectors of
    length 1; [N, F].
    """
    features_NF = np.zeros((len(texts), NUM_FEATURES), np.float32)
    for row_F, text in zip(features_NF, texts, strict=True):
        points_T = np.frombuffer(
            f" {' '.join(text.lower().split())} ".encode("utf-32-le", "surrogatepass"), np.uint32
        )
        begin_T, middle_T, end_T = points_T[:-2], points_T[1:-1], points_T[2:]
        hashed_T = begin_T * FACTORS[0] + middle_T * FACTORS[1] + end_T * FACTORS[2]
        # A blank in the middle would join two words. The sum wraps around in uint32; its top 12
        # bits are kept.
        row_F[hashed_T[middle_T != BLANK] >> HASH_SHIFT] = 1
    # Of the 0/1 entries the sum is the squared length. The maximum keeps an empty text at 0.
    features_NF /= np.sqrt(np.maximum(features_NF.sum(1), 1))[:, None]
    return features_NF
