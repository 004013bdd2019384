"""A draft without a network: the next token is one that followed the same tokens before (He et al., arXiv 2311.08252).

    ... a b c ─┬─► the longest run of last tokens that stands earlier in the request ─► the token after it ─┐
               └─► the longest run that stands in the target's answers ─► the most frequent token after it ─┴─► the more
                                                                                    probable of the two is drafted

Then the same again behind that token, as long as the probability that all tokens so far are accepted pays for one more
row to verify. The answers are counted once. Nothing is trained, and drafting takes no pass of a model.

R = entries of the table, N = longest run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from redraft.heads.files.folder import CONFIG, WEIGHTS, read_config

Ids = NDArray[np.int32]
Run = tuple[int, ...]  # Consecutive tokens, the last ones of some text.

FOLDER = "retrieval"  # Key of a speculative config for the folder of a draft.
VERIFY_COST = "verify_cost"  # Key of a speculative config for `Config.verify_cost`.
LEAST_FIRST = "least_first"  # Key of a speculative config for `Retrieval.least_first`.
BEFORE_HEAD = 0.5  # `Retrieval.least_first` before a head.
TOKEN_BYTES = 4
HELD_OUT = 10  # every tenth text is counted last: it shows how probable predictions are
NOTHING = (-1, 0.0)  # No token, and its probability.


@dataclass(frozen=True, kw_only=True)
class Config:
    max_run: int = 6
    """Longest run of tokens to look up."""
    max_entries: int = 1_000_000
    """Most runs to keep, the most frequent ones. Each takes about 400 bytes of a server's memory."""
    min_texts: int = 1
    """Fewest conversations in which a run must be followed by its token. With 2 or more, a run that
    stands in one conversation only is left out."""
    verify_cost: float = 0.05
    """Cost of verifying one more token, in target steps of one request. With n requests in a step, a token is drafted
    if its probability of acceptance is at least n times this."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_run <= 16:
            raise ValueError(f"runs of up to {self.max_run} tokens: give 1 to 16")
        if self.min_texts < 1:
            raise ValueError(f"a run is to be found in {self.min_texts} conversations: give at least 1")
        if not 0 <= self.verify_cost <= 1:
            raise ValueError(f"a token costs {self.verify_cost} steps to verify: give 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and its answer, as one sequence."""

    ids: Ids
    is_label: NDArray[np.bool_]  # Tokens written by the target.


class Retrieval:
    """A counted draft. Drafting is plain Python: about 8 us a token."""

    def __init__(
        self,
        config: Config,
        entries: Mapping[Run, tuple[int, float]],
        run_probability: Sequence[float],
        *,
        least_first: float = 0.0,
    ) -> None:
        """`entries` are the most probable token after each run of the answers, and its probability;
        `run_probability` is, by length, the probability of the token after the run's first place in
        the request. Before a head, first tokens less probable than `least_first` are left to the
        head. Raises ValueError: that is no probability."""
        require_probability(least_first)
        self.config = config
        self.entries = entries
        self.run_probability = list(run_probability)
        self.least_first = least_first

    def propose(self, ids: Ids, most: int, num_requests: int = 1) -> list[int]:
        """At most `most` tokens to draft behind `ids` ([T], int32), in a step with `num_requests` requests."""
        # Every request of the step pays for a row of this one, so a busy server drafts only likely tokens.
        floor = min(1.0, self.config.verify_cost * num_requests)
        # Bytes, because `bytes.find` is one fast call. The machine's order is taken to be little-endian.
        data, drafted, probability = ids.tobytes(), list[int](), 1.0
        while len(drafted) < most:
            # The first of equals, so the request wins a tie.
            token, its = max(self._in_request(data), self._in_answers(data), key=itemgetter(1))
            probability *= its
            if token < 0 or probability < (floor if drafted else max(floor, self.least_first)):
                break
            drafted.append(token)
            data += token.to_bytes(TOKEN_BYTES, "little")
        return drafted

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        """The proposals behind ids[:first], ids[:first + 1], ... of a request that is alone in its steps."""
        whole = np.asarray(ids, np.int32)
        for end in range(first, first + num_prefixes):
            yield self.propose(whole[:end], num_speculative_tokens)

    def _in_request(self, data: bytes) -> tuple[int, float]:
        length, after = find_run(data, self.config.max_run)
        if not length:
            return NOTHING
        return int.from_bytes(data[after : after + TOKEN_BYTES], "little"), self.run_probability[length]

    def _in_answers(self, data: bytes) -> tuple[int, float]:
        last = tuple(np.frombuffer(data[-TOKEN_BYTES * self.config.max_run :], np.int32).tolist())
        # The longest run first: last[0:], last[1:], ...
        return next((self.entries[last[i:]] for i in range(len(last)) if last[i:] in self.entries), NOTHING)

    @staticmethod
    def speculative_config(
        folder: Path, *, verify_cost: float | None = None, least_first: float | None = None
    ) -> dict[str, Any]:
        """vLLM's speculative config, without num_speculative_tokens; the last keys reach the plugin
        past vLLM. Raises ValueError: an option is out of bounds."""
        if verify_cost is not None:
            Config(verify_cost=verify_cost)
        if least_first is not None:
            require_probability(least_first)
        lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
        given = {key: v for key, v in ((VERIFY_COST, verify_cost), (LEAST_FIRST, least_first)) if v is not None}
        return {**lookup, FOLDER: str(folder.absolute()), **given}

    def write(self, folder: Path) -> None:
        """Write config.json and the table: `runs` [R, N], padded in front with -1, `token` and `probability` [R]."""
        config = self.config
        runs_RN = np.full((len(self.entries), config.max_run), -1, np.int32)
        for row, run in zip(runs_RN, self.entries, strict=True):
            row[-len(run) :] = run
        tokens, probabilities = zip(*self.entries.values(), strict=True) if self.entries else ((), ())
        tensors = {
            "ngrams.runs": runs_RN,
            "ngrams.token": np.array(tokens, np.int32),
            "ngrams.probability": np.array(probabilities, np.float32),
            "ngrams.run_probability": np.array(self.run_probability, np.float32),
        }
        (folder / CONFIG).write_text(json.dumps({"redraft": {"family": "retrieval", **vars(config)}}, indent=1))
        save_file(tensors, folder / WEIGHTS)

    @staticmethod
    def read(folder: Path, *, least_first: float = 0.0, **changes: float) -> Retrieval:
        """The draft of a folder, with `changes` to its config. Raises FileNotFoundError;
        ValueError: it holds another kind of draft, or an option is out of bounds."""
        written = dict(read_config(folder).get("redraft", {}))
        if written.pop("family", "") != "retrieval":
            raise ValueError(f"{folder} holds no counted answers: `redraft retrieval` writes such a folder")
        tensors = load_file(folder / WEIGHTS)
        rows = zip(*(tensors[f"ngrams.{name}"].tolist() for name in ("runs", "token", "probability")), strict=True)
        entries = {tuple(t for t in run if t >= 0): (token, probability) for run, token, probability in rows}
        probabilities = tensors["ngrams.run_probability"].tolist()
        return Retrieval(Config(**(written | changes)), entries, probabilities, least_first=least_first)


def require_probability(least_first: float) -> None:
    """Raise ValueError unless this is a probability."""
    if not 0 <= least_first <= 1:
        raise ValueError(f"the least probability of the first token is {least_first}: give 0 to 1")


def is_retrieval(folder: str | Path) -> bool:
    config = Path(folder) / CONFIG
    return config.is_file() and read_config(Path(folder)).get("redraft", {}).get("family") == "retrieval"


def find_run(data: bytes, max_run: int) -> tuple[int, int]:
    """The longest run of last tokens, up to `max_run`, that stands earlier too: (length, offset in
    bytes of the token after its first place). (0, 0) if not even the last token does.
    `data` has 4 bytes per token."""
    found, start = (0, 0), 0
    for length in range(1, min(max_run, len(data) // TOKEN_BYTES) + 1):
        run = data[-TOKEN_BYTES * length :]
        # a longer run ends where a shorter one does, or later; a token must follow it
        start = _find_aligned(data, run, max(start - TOKEN_BYTES, 0))
        if start < 0:
            break
        found = length, start + len(run)
    return found


def _find_aligned(data: bytes, run: bytes, start: int) -> int:
    """Offset of `run` as whole tokens in all but the last token of `data`, -1 if it is not there."""
    # An unaligned hit straddles two tokens. -1 % 4 is 3, so a miss needs the second condition.
    while (at := data.find(run, start, len(data) - TOKEN_BYTES)) % TOKEN_BYTES and at >= 0:
        start = at + 1
    return at


def count_answers(texts: Sequence[Text], config: Config) -> Retrieval:
    """Count the labels of these texts by the runs before them.
    Probabilities are measured on every tenth text with the counts of the others: how often the
    predicted token came, by the run's length, how often it was seen, and how often that token
    followed. Raises ValueError: there is no label to count."""
    if not any(text.is_label.any() for text in texts):
        raise ValueError("no answer to count: the data has no label")
    # 1. From held-out texts learn how often predictions come true; of few texts they overlap.
    held_out = texts[::HELD_OUT] if len(texts) > HELD_OUT else texts
    others = [text for number, text in enumerate(texts) if number % HELD_OUT] or texts
    hits = measure_hits(held_out, {row.run: row for row in _count(others, config)}, config)
    # 2. Count all texts, and give each run the probability of runs of the same kind.
    kept = [row for row in _count(texts, config) if row.num_texts >= config.min_texts]
    entries: dict[Run, tuple[int, float]] = {}
    for row in sorted(kept, key=lambda row: -row.seen)[: config.max_entries]:
        entries[row.run] = (row.token, hits.of_row(row))
    # Without those that say what the next shorter run says.
    entries = {run: found for run, found in entries.items() if entries.get(run[1:]) != found}
    return Retrieval(config, entries, hits.by_length(config.max_run))


@dataclass(frozen=True, slots=True)
class Row:
    """A run of the answers, and the most frequent token after it."""

    run: Run
    token: int
    seen: int  # Times that the run was followed by a label.
    followed: int  # Times that it was followed by `token`.
    num_texts: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """Rows of one kind are measured together: by length, times seen and share."""
        # The share in quarters, 0 to 4. E.g. 3 of 5 times after two tokens: (2, 4, 2).
        return len(self.run), min(self.seen, 4), 4 * self.followed // self.seen


class Hits:
    """How often predictions came true, by their kind."""

    def __init__(self) -> None:
        self.in_answers: dict[tuple[int, int, int], list[int]] = {}
        self.in_request: dict[int, list[int]] = {}

    def of_row(self, row: Row) -> float:
        """The probability that a row's token comes."""
        hits, total = self.in_answers.get(row.kind, (0, 0))
        # the row's own share, less half a time, counts as one more trial
        return (hits + (row.followed - 0.5) / row.seen) / (total + 1)

    def by_length(self, max_run: int) -> list[float]:
        """The probability of a token found in the request, by the length of the run; 0 for no run."""
        counts = [self.in_request.get(length, (0, 0)) for length in range(max_run + 1)]
        # Half a hit in one more trial: a length never met counts as 0.5, not as 0 / 0.
        return [0.0, *((hits + 0.5) / (total + 1) for hits, total in counts[1:])]


def measure_hits(texts: Iterable[Text], rows: Mapping[Run, Row], config: Config) -> Hits:
    """Predict every label of the texts from the tokens before it, in both ways."""
    hits = Hits()
    for text in texts:
        ids, data = text.ids.tolist(), text.ids.astype(np.int32).tobytes()
        for at in np.flatnonzero(text.is_label).tolist():
            length, after = find_run(data[: TOKEN_BYTES * at], config.max_run)
            if length:
                _add(hits.in_request, length, ids[after // TOKEN_BYTES] == ids[at])
            last = ids[max(0, at - config.max_run) : at]
            row = next((rows[run] for i in range(len(last)) if (run := tuple(last[i:])) in rows), None)
            if row is not None:
                _add(hits.in_answers, row.kind, row.token == ids[at])
    return hits


def _add(counts: dict[Any, list[int]], key: Any, is_hit: bool) -> None:
    count = counts.setdefault(key, [0, 0])
    count[0] += is_hit
    count[1] += 1


def _count(texts: Sequence[Text], config: Config) -> Iterator[Row]:
    for length in range(1, config.max_run + 1):
        windows = [_windows(text, length, number) for number, text in enumerate(texts) if len(text.ids) > length]
        if windows:
            yield from _reduce(np.concatenate(windows))


def _windows(text: Text, length: int, number: int) -> Ids:
    """The runs of this length before each label, then the label and the number of the text."""
    # Row i holds ids[i : i + length + 1], so the label is ids[i + length].
    windows = np.lib.stride_tricks.sliding_window_view(text.ids, length + 1)[text.is_label[length:]]
    return np.asarray(np.c_[windows, np.full(len(windows), number)], np.int32)


def _reduce(windows: Ids) -> Iterator[Row]:
    if not len(windows):
        return
    # sorted by run, then by token, then by text
    # [n, length + 2]: the run, the label, the number of the text.
    unique, counts = np.unique(windows, axis=0, return_counts=True)
    tokens = _begins(unique[:, :-1])
    # A group of rows for each run and token: the sum of counts, and the number of texts.
    followed, num_texts = np.add.reduceat(counts, tokens), np.diff(tokens, append=len(unique))
    unique = unique[tokens, :-1]
    runs = _begins(unique[:, :-1])
    # A group of tokens for each run.
    seen, sizes = np.add.reduceat(followed, runs), np.diff(runs, append=len(unique))
    # the most frequent token of each run comes last
    best = np.lexsort((followed, np.repeat(np.arange(len(runs)), sizes)))[runs + sizes - 1]
    columns = (unique[best].tolist(), seen.tolist(), followed[best].tolist(), num_texts[best].tolist())
    for (*run, token), times, hits, texts in zip(*columns, strict=True):
        yield Row(tuple(run), token, times, hits, texts)


def _begins(rows: Ids) -> NDArray[np.intp]:
    begins: NDArray[np.intp] = np.flatnonzero(np.r_[True, (rows[1:] != rows[:-1]).any(axis=1)])
    return begins
