"""A draft without a neural network.

It proposes a token that followed the same tokens before (He et al., arXiv 2311.08252).

    ... a b c ─┬─► the longest run of last tokens that occurs earlier in the request ─► the token after it ─┐
               └─► the longest run that occurs in the target's answers ─► the majority-vote token after it ─┴─► the more
                                                                                    probable of the two is drafted

This is repeated after that token, as long as the probability that all tokens so far are accepted
justifies verifying one more row. Answers are counted beforehand, or while serving. Nothing is
trained, and no model drafts.

R = entries of the table, N = longest run.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from redraft.files.artifact import safetensors_header
from redraft.files.folder import CONFIG, WEIGHTS, read_config
from redraft.files.setting_error import SettingError, require_least
from redraft.heads.families.run_table import MOST_VOTES, Entries, Found, RunTable

Ids = NDArray[np.int32]
Run = tuple[int, ...]  # The last tokens of a text, in order.
Row = int  # token << 5 | votes, plus texts * TEXTS for runs in fewer than `min_texts` texts

LIVE = "live"  # name of the draft that counts its server's answers
MEASURE_COUNTED = "measure counted answers instead (redraft data count)"
FOLDER = "retrieval"  # Key of a speculative config for the folder of a draft, or LIVE.
VERIFY_COST = "verify_cost"  # Key of a speculative config for `Config.verify_cost`.
BEFORE_HEAD = 0.5  # `Retrieval.least_first` before a head.
TOKEN_BYTES = 4
# Maximum number of token ids that `as_text` can distinguish: a power of 2 minus 1.
MOST_IDS = (1 << 20) - 1
WINDOW = 10_000
"""Default number of newest answers that live counts keep."""
VOTES, TEXTS = 31, 1 << 30
NEW = -32  # a row without votes or a token
SHARD = 1 << 12  # maximum number of runs to drop, or to move in memory, at once
# Number of live predictions of one kind after which both sums are halved, so that the rates follow
# the traffic.
REMEMBERED = 4096
EXPECTED = (
    0.2,
    0.4,
    0.8,
)  # prior hit rates of runs in the request, by length, measured on SmolLM2's code answers
NOTHING = (-1, 0.0)  # No token, and its probability.


@dataclass(frozen=True, kw_only=True)
class Config:
    max_run: int = 6
    """Maximum length of a run of tokens to look up."""
    max_entries: int = 1_000_000
    """Maximum number of runs to keep. Each takes 44 bytes of server memory, or 16 bytes in live
    counts.
    """
    min_texts: int = 1
    """Minimum number of conversations in which a run must be followed by its token. With 2 or more,
    runs that occur in only one conversation are omitted.
    """
    verify_cost: float = 0.05
    """Cost of verifying one more token, in target steps of one request. A token is drafted while it
    raises the expected number of tokens per unit of time (`Retrieval.propose`).
    """

    def __post_init__(self) -> None:
        if not 1 <= self.max_run <= 16:
            raise SettingError(f"{{max_run}} is {self.max_run}: it must be between 1 and 16")
        require_least(self, max_entries=1, min_texts=1)
        if not 0 <= self.verify_cost <= 1:
            raise SettingError(f"{{verify_cost}} is {self.verify_cost}: it must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A prompt and its answer, as one sequence."""

    ids: Ids
    is_label: NDArray[np.bool_]
    """Whether the target wrote each token."""
    owner: bytes = b""
    """Name of the text's owner. All names have the same length. Drafts never use another owner's
    text.
    """


class Retrieval:
    """A draft from counted answers. Drafting is plain Python and takes about 8 us per token."""

    def __init__(
        self,
        config: Config,
        entries: Mapping[Run, tuple[int, float]],
        run_probability: Sequence[float],
    ) -> None:
        """Create a draft from counted runs.

        `entries` maps each run in the answers to the token after it and its probability.
        `run_probability` contains, by length, the probability of the token after the run's first
        occurrence in the request.
        """
        self.config = config
        self.entries = (
            entries if isinstance(entries, Entries) else Entries.of(entries, config.max_run)
        )
        self.run_probability = list(run_probability)
        self.least_first = 0.0  # If the first token is less probable, the head drafts.

    def propose(
        self, ids: Ids, most: int, num_requests: int = 1, owner: bytes | None = b""
    ) -> list[int]:
        """Propose at most `most` draft tokens to follow `ids` ([T], int32).

        The step has `num_requests` requests.

        Live counts propose only text of this `owner`, and none if `owner` is None. A request's own
        text is always used.

        The draft ends at the greatest expected number of tokens per unit of cost, if all requests
        in the step draft the same number: with probability p that a token and all before it are
        right, it is drafted if p / row >= E / (1 + d row). `row` is the cost of verifying one token
        for every request, and E - 1 the expected number of accepted tokens among the d drafted so
        far.
        """
        row = min(1.0, self.config.verify_cost * num_requests)
        expected = cost = 1.0
        # The machine's byte order is assumed to be little-endian.
        last_bytes = TOKEN_BYTES * self.config.max_run
        last = ids[-self.config.max_run :].tobytes()
        text, drafted, probability = as_text(ids), list[int](), 1.0
        while len(drafted) < most:
            # `max` returns the first of equal values, so the request wins a tie.
            found = self._in_request(text), self._in_answers(last, owner)
            token, its = max(found, key=itemgetter(1))
            probability *= its
            least = 0.0 if drafted else self.least_first
            if token < 0 or probability < least or probability * cost < row * expected:
                break
            expected, cost = expected + probability, cost + row
            drafted.append(token)
            text += chr(token + 1)
            last = (last + token.to_bytes(TOKEN_BYTES, "little"))[-last_bytes:]
        return drafted

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        """Yield the proposals that follow ids[:first], ids[:first + 1], ...

        The request is the only one in its steps.
        """
        whole = np.asarray(ids, np.int32)
        for end in range(first, first + num_prefixes):
            yield self.propose(whole[:end], num_speculative_tokens)

    def _in_request(self, text: str) -> tuple[int, float]:
        length, after = find_run(text, self.config.max_run)
        return (ord(text[after]) - 1, self.run_probability[length]) if length else NOTHING

    def _in_answers(self, last: bytes, owner: bytes | None) -> tuple[int, float]:
        return self.entries.find(last) or NOTHING

    @staticmethod
    def speculative_config(
        folder: Path | str, *, verify_cost: float | None = None
    ) -> dict[str, Any]:
        """Build vLLM's speculative config, without num_speculative_tokens.

        The last keys are for redraft's plugin; vLLM ignores them.

        Raises:
            ValueError: an option is out of bounds.
        """
        if verify_cost is not None:
            Config(verify_cost=verify_cost)
        lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 1}
        given = {} if verify_cost is None else {VERIFY_COST: verify_cost}
        return {
            **lookup,
            FOLDER: folder if folder == LIVE else str(Path(folder).absolute()),
            **given,
        }

    def write(self, folder: Path) -> None:
        """Write config.json and the table.

        The table contains `runs` [R, N], padded in front with -1, and `token` and `probability`
        [R].
        """
        config = self.config
        tensors = {f"ngrams.{name}": values for name, values in self.entries.read().items()}
        tensors["ngrams.run_probability"] = np.array(self.run_probability, np.float32)
        (folder / CONFIG).write_text(
            json.dumps({"redraft": {"family": "retrieval", **vars(config)}}, indent=1)
        )
        save_file(tensors, folder / WEIGHTS)

    @staticmethod
    def read(folder: Path, **changes: Any) -> Retrieval:
        """Read the draft from a folder, with `changes` to its config.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the folder contains a different kind of draft, or an option is out of
                bounds.
        """
        written = dict(read_config(folder).get("redraft", {}))
        if written.pop("family", "") != "retrieval":
            raise ValueError(
                f"{folder} contains no counted answers: create such a folder with `redraft data count`"
            )
        tensors = load_file(folder / WEIGHTS)
        entries = Entries(*(tensors[f"ngrams.{name}"] for name in ("runs", "token", "probability")))
        probabilities = tensors["ngrams.run_probability"].tolist()
        return Retrieval(Config(**(written | changes)), entries, probabilities)


def is_retrieval(folder: str | Path) -> bool:
    config = Path(folder) / CONFIG
    return (
        config.is_file()
        and read_config(Path(folder)).get("redraft", {}).get("family") == "retrieval"
    )


def require_answers(folder: Path) -> None:
    """Raise ValueError if the header of a folder's table shows that it is empty."""
    table = folder / WEIGHTS
    if table.is_file():
        runs = safetensors_header(table).get("ngrams.runs", {"shape": (0,)})
        if runs["shape"][0]:
            return
    raise ValueError(
        f"{folder} contains no answers: count some (`redraft data count --target TARGET --data FILE`), or "
        f"let the server count its own (--draft {LIVE})"
    )


def as_text(ids: Ids) -> str:
    """Encode each token as one character, whose code point is the token's id + 1.

    `str.find` searches such text in C. In bytes, it would stop at every match that straddles two
    tokens, and a client could cause many such matches.
    """
    # numpy's strings end at trailing zeros, so no token may be 0. Ids above MOST_IDS wrap around.
    return str(((ids & MOST_IDS) + 1).view(f"<U{len(ids)}").item()) if len(ids) else ""


def find_run(text: str, max_run: int, end: int | None = None) -> tuple[int, int]:
    """Find the longest run at the end of text[:end], up to `max_run`, that also occurs earlier.

    Return (length, index of the token after its first occurrence), or (0, 0) if not even the last
    token occurs earlier. `text` comes from `as_text`.
    """
    end = len(text) if end is None else end
    found, start = (0, 0), 0
    for length in range(1, min(max_run, end) + 1):
        # A longer run ends at the same position as a shorter one or later, and a token must follow
        # it.
        start = text.find(text[end - length : end], max(start - 1, 0), end - 1)
        if start < 0:
            break
        found = length, start + length
    return found


def _as_run(run: bytes) -> Run:
    return tuple(np.frombuffer(run, np.int32).tolist())


def count_answers(texts: Iterable[Text], config: Config) -> Retrieval:
    """Count the labels in these texts by the runs before them.

    Raises:
        ValueError: there is no label to count.
    """
    runs = RunVotes(config)
    counts = Counts(config, runs)
    for text in texts:
        deque(counts.learn(text), maxlen=0)
    if not runs.num_texts:
        raise ValueError("there are no answers to count: the data has no labels")
    return Retrieval(config, runs.list_entries(counts.probability), counts.by_length())


class Counts:
    """Counts of the runs in the answers, updated text by text at about 10 us per token.

    Each text first tests the predictions made from earlier texts. The hit rates by length and votes
    become the probabilities.
    """

    def __init__(
        self, config: Config, runs: RunVotes | RunTable, remembered: float = float("inf")
    ) -> None:
        self.config, self.runs, self.remembered = config, runs, remembered
        # The key is the length of a run in the request, or the `_kind` of a run in the answers.
        self.hits: dict[int | tuple[int, int], list[float]] = {
            length: [10 * EXPECTED[min(length, len(EXPECTED)) - 1], 10]
            for length in range(1, config.max_run + 1)
        }

    def learn(self, text: Text) -> Iterator[None]:
        """Count a text, yielding between steps so that the caller can pause."""
        labels, most = np.flatnonzero(text.is_label).tolist(), self.config.max_run
        ids, data, chars = text.ids.tolist(), text.ids.astype(np.int32).tobytes(), as_text(text.ids)
        if labels:
            self.runs.begin_text()
        for at in labels:
            length, after = find_run(chars, most, at)
            if length:
                self._note(length, ids[after] == ids[at])
            last = data[TOKEN_BYTES * max(0, at - most) : TOKEN_BYTES * at]
            if found := self.runs.find(last, text.owner):
                self._note(_kind(found), found.token == ids[at])
            yield
        for at in labels:
            last = data[TOKEN_BYTES * max(0, at - most) : TOKEN_BYTES * at]
            self.runs.add(last, ids[at], text.owner)
            yield

    def predict(self, last: bytes, owner: bytes = b"") -> tuple[int, float]:
        """Predict the token after the owner's longest counted run at the end of `last`.

        Returns (token, probability).
        """
        found = self.runs.find(last, owner)
        return (found.token, self.probability(_kind(found))) if found else NOTHING

    def by_length(self) -> list[float]:
        """The probability of the token after a run's first occurrence in the request, by length."""
        return [0.0, *map(self.probability, range(1, self.config.max_run + 1))]

    def probability(self, kind: int | tuple[int, int]) -> float:
        hits, total = self.hits.get(kind, (0, 0))
        # Add half a hit in one more trial, so that an unseen kind gets 0.5 instead of 0 / 0.
        return (hits + 0.5) / (total + 1)

    def _note(self, kind: int | tuple[int, int], is_hit: bool) -> None:
        count = self.hits.setdefault(kind, [0, 0])
        count[0] += is_hit
        count[1] += 1
        if count[1] > self.remembered:
            count[:] = count[0] / 2, count[1] / 2


class RunVotes:
    """The runs in a data set with their tokens, in a form that can be written to a file.

    If there are more than `max_entries` runs, those counted least recently are dropped. Live counts
    use `RunTable`, which needs a twentieth of the memory.
    """

    def __init__(self, config: Config) -> None:
        self.min_texts, self.num_texts = config.min_texts, 0
        self._num_shards = 1 + config.max_entries // SHARD
        self._most = max(1, config.max_entries // 2 // self._num_shards)
        self._newer: list[dict[bytes, Row]] = [{} for _ in range(self._num_shards)]
        self._older: list[dict[bytes, Row]] = [{} for _ in range(self._num_shards)]

    def begin_text(self) -> None:
        self.num_texts += 1

    def find(self, last: bytes, owner: bytes) -> Found | None:
        for begin in range(0, len(last), TOKEN_BYTES):
            run = owner + last[begin:]
            shard = zlib.crc32(run) % self._num_shards
            row = self._newer[shard].get(run)
            if row is None:
                row = self._older[shard].get(run, TEXTS)
            if row < TEXTS:
                return Found((len(last) - begin) // TOKEN_BYTES, row & VOTES, row >> 5)
        return None

    def add(self, last: bytes, token: int, owner: bytes) -> None:
        """Count `token` after every run at the end of `last`."""
        for begin in range(0, len(last), TOKEN_BYTES):
            run = owner + last[begin:]
            shard = zlib.crc32(run) % self._num_shards
            newer = self._newer[shard]
            row = newer.get(run)
            if row is None:
                if len(newer) >= self._most:
                    self._older[shard] = newer
                    newer = self._newer[shard] = {}
                row = self._older[shard].pop(run, NEW)
            newer[run] = self._vote(row, token)

    def list_entries(
        self, probability: Callable[[tuple[int, int]], float]
    ) -> dict[Run, tuple[int, float]]:
        """Return `Retrieval.entries`, without runs that predict the next shorter run's token."""
        rows = [
            item
            for shard in (*self._older, *self._newer)
            for item in shard.items()
            if item[1] < TEXTS
        ]
        found = {}
        for run, row in rows:
            its = Found(len(run) // TOKEN_BYTES, row & VOTES, row >> 5)
            found[_as_run(run)] = its.token, probability(_kind(its))
        return {run: entry for run, entry in found.items() if found.get(run[1:]) != entry}

    def _vote(self, row: Row, token: int) -> Row:
        """Return the row after one more `token`, by the majority vote of Boyer and Moore (1981).

        The vote keeps one token per run, and new text displaces old text.
        """
        if row >> 5 == token:
            return row + 1 if row & VOTES < MOST_VOTES else row
        least, num_texts = self.min_texts, 1
        if row % TEXTS >> 5 == token:  # in too few texts
            last_text, num_texts = divmod(row // TEXTS, least)
            num_texts += last_text != self.num_texts
            row = row % TEXTS + (row & VOTES < MOST_VOTES)
        elif row & VOTES:
            return row - 1
        else:
            row = token << 5 | 1
        return row if num_texts >= least else row + TEXTS * (self.num_texts * least + num_texts)


def _kind(found: Found) -> tuple[int, int]:
    return found.length, found.votes.bit_length()  # 0, 1, 2 to 3, 4 to 7, 8 to 15 or 16 votes


class Live(Retrieval):
    """Counts that learn while serving, from a window of answers.

    Each owner has its own runs, unless tenants share them. Hit rates cover all texts, because they
    are only numbers.
    """

    def __init__(self, config: Config, *, window: int = WINDOW, shares: bool = False) -> None:
        runs = RunTable(max_entries=config.max_entries, window=window, shares=shares)
        self.runs, self.counts = runs, Counts(config, runs, REMEMBERED)
        super().__init__(config, {}, self.counts.by_length())

    def learn(self, text: Text) -> Iterator[None]:
        """Count a text as `Counts.learn` does, then update the run probabilities."""
        yield from self.counts.learn(text)
        self.run_probability = self.counts.by_length()

    def read_state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return everything that has been counted, as tensors and numbers."""
        tensors, numbers = self.runs.read()
        hits = [[kind, count] for kind, count in list(self.counts.hits.items())]
        return tensors, {**numbers, "max_run": self.config.max_run, "hits": hits}

    def restore(self, tensors: Mapping[str, NDArray[Any]], numbers: Mapping[str, Any]) -> bool:
        """Restore the result of `read_state`. Return False if different settings produced it."""
        if numbers["max_run"] != self.config.max_run or not self.runs.restore(tensors, numbers):
            return False
        self.counts.hits = {
            tuple(kind) if isinstance(kind, list) else kind: count
            for kind, count in numbers["hits"]
        }
        self.run_probability = self.counts.by_length()
        return True

    def _in_answers(self, last: bytes, owner: bytes | None) -> tuple[int, float]:
        return NOTHING if owner is None else self.counts.predict(last, owner)
