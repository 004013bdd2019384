"""Tokenised data on disk.

The first process of a launch writes it once, and all processes memory-map it, even when a run is
resumed.

tokens/3f2a.../                 the name is a hash of everything on which the tokens depend (`Origin`)
  train.ids      int32          the tokens of all samples, concatenated
  train.labels   bool           whether each is a label
  train.ends     int64          where each sample ends
  train.keys     32 bytes       hash of each sample's conversation
  train.kinds    int32          domain and template arguments, as an index in `about.json`
  held-out.*                    the same
  about.json                    origin, counts, held-out prompts
"""

import importlib.metadata
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.samples import Sample, SampleStats, data_hash
from redraft.engine.prompts import Prompt
from redraft.files.artifact import manifest, publish, require_sizes
from redraft.files.kept import hash_key
from redraft.files.lock import wait_for
from redraft.files.target_folder import writes_date

ABOUT = "about.json"
PARTS = ("train", "held-out")
BLOCK = 1 << 22  # Tokens counted at once.

Origin = dict[str, Any]  # everything that the tokens depend on, keyed by its name in messages


class MappedSamples(Sequence[Sample]):
    """The samples of one part, read from disk when they are used.

    All processes on a machine share the memory.
    """

    def __init__(self, folder: Path, part: str, kinds: Sequence[Sequence[str]]) -> None:
        self._ids: NDArray[np.int32] = _map(folder / f"{part}.ids", np.int32)
        self._labels: NDArray[np.bool_] = _map(folder / f"{part}.labels", np.bool_)
        self._ends: NDArray[np.int64] = _map(folder / f"{part}.ends", np.int64)
        self._keys: NDArray[np.uint8] = _map(folder / f"{part}.keys", np.uint8).reshape(-1, 32)
        self._kind_of: NDArray[np.int32] = _map(folder / f"{part}.kinds", np.int32)
        self._kinds = kinds

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = np.diff(self._ends, prepend=0).tolist()
        return lengths

    def labels(self) -> Iterator[NDArray[np.int32]]:
        """Yield all labels in blocks, three times as fast as one sample at a time."""
        for start in range(0, len(self._ids), BLOCK):
            span = slice(start, start + BLOCK)
            yield self._ids[span][self._labels[span]]

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        span = slice(int(self._ends[number - 1]) if number else 0, int(self._ends[number]))
        domain, arguments = self._kinds[self._kind_of[number]]
        # Copy, because torch warns about arrays that it cannot write to.
        return Sample(
            input_ids=self._ids[span].copy(),
            loss_mask=self._labels[span].copy(),
            conversation=self._keys[number].tobytes().hex(),
            domain=domain,
            arguments=arguments,
        )


def _map(path: Path, dtype: Any) -> NDArray[Any]:
    # Use a plain array over the same memory, because slices of a memmap object are slower.
    return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    train: Sequence[Sample]
    held_out: Sequence[Sample]
    prompts: list[Prompt]
    stats: SampleStats
    said: list[str]
    hash: str
    """`data_hash` of the training samples."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """The data of a run before it is written. The samples are made while they are written."""

    train: Iterable[Sample]
    held_out: Iterable[Sample]
    prompts: Callable[[], list[Prompt]]
    """Function that builds the held-out prompts, called after both parts are written."""
    stats: SampleStats
    say: Callable[[], list[str]]


def keep_tokens(root: Path, origin: Origin, make: Callable[[], Content], *, shared: bool) -> Path:
    """Return the folder below `root` with the tokens for `origin`, and write it if incomplete.

    A `root` that is not `shared` belongs to a single run. Tokens for a different origin are then
    removed, and a printed line gives the reason.
    """
    folder = root / hash_key(origin)[:16]
    if _is_whole(folder):
        return folder
    others = (
        []
        if shared
        else [other for other in root.glob("*/") if other != folder and (other / ABOUT).is_file()]
    )
    for other in others:
        before = json.loads((other / ABOUT).read_text())["origin"]
        changed = [name for name in origin if before.get(name) != origin[name]]
        print(f"the data is tokenised again, because this changed: {', '.join(changed)}")
    # Several runs may share a root. One writes, and the others wait and then read.
    lock = root / f".{folder.name}.lock"
    waiting = f"another run is tokenising the data in {root}: waiting for it"
    with wait_for(lock, waiting) if shared else nullcontext():
        if not _is_whole(folder):
            try:
                publish(
                    folder,
                    lambda partial: _write(partial, origin, make()),
                    {},
                    overwrite=folder.exists(),
                )
            except FileExistsError:  # another run has written them, on a file system without locks
                if not _is_whole(folder):
                    raise
        # Any process that acquires the lock from now on finds complete tokens.
        lock.unlink(missing_ok=True)
    # Do this last, so that a kill before this leaves the old tokens complete.
    for other in others:
        shutil.rmtree(other)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        require_sizes(folder, manifest(folder))
    except (FileNotFoundError, ValueError):
        return False
    return True


def _write(folder: Path, origin: Origin, content: Content) -> None:
    kinds: dict[tuple[str, str], int] = {}
    for part, samples in zip(PARTS, (content.train, content.held_out), strict=True):
        _write_part(folder, part, samples, kinds)
    about = {
        "origin": origin,
        "kinds": list(kinds),
        "prompts": [asdict(prompt) for prompt in content.prompts()],
        # Hash the files just written, because the samples were a stream.
        "hash": data_hash(MappedSamples(folder, PARTS[0], list(kinds))),
        "stats": vars(content.stats),
        "said": content.say(),
    }
    (folder / ABOUT).write_text(json.dumps(about) + "\n")


def _write_part(
    folder: Path, part: str, samples: Iterable[Sample], kinds: dict[tuple[str, str], int]
) -> None:
    ends, keys, numbers, end = array("q"), bytearray(), array("i"), 0
    with (
        (folder / f"{part}.ids").open("wb") as ids,
        (folder / f"{part}.labels").open("wb") as labels,
    ):
        for sample in samples:
            ids.write(sample.input_ids.astype("<i4").tobytes())
            labels.write(sample.loss_mask.tobytes())
            end += len(sample.input_ids)
            ends.append(end)
            keys += bytes.fromhex(sample.conversation)
            numbers.append(kinds.setdefault((sample.domain, sample.arguments), len(kinds)))
    for name, values in (("ends", ends), ("keys", keys), ("kinds", numbers)):
        (folder / f"{part}.{name}").write_bytes(bytes(values))


def read_tokens(folder: Path) -> Tokens:
    about = json.loads((folder / ABOUT).read_text())
    train, held_out = (MappedSamples(folder, part, about["kinds"]) for part in PARTS)
    counters = ("refused_answers", "refusals", "arguments", "ends")
    stats: dict[str, Any] = {
        name: Counter(value) if name in counters else value
        for name, value in about["stats"].items()
    }
    return Tokens(
        train=train,
        held_out=held_out,
        prompts=[Prompt(**prompt) for prompt in about["prompts"]],
        stats=SampleStats(**stats),
        said=about["said"],
        hash=about["hash"],
    )


# -------------------------------------------------------------------------------------------------------------
# origin


def describe_tokenizer(tokenizer: Any, day: str) -> Origin:
    """Return the part of an origin that describes the tokenizer and the code around it.

    `day` is included only if the template writes the date.
    """
    return {
        "the chat template": hash_key(tokenizer.chat_template),
        "the tokenizer": hash_key([*_spelling(tokenizer)]),
        "the date": day if writes_date(tokenizer) else None,
        # Any edit in this folder counts, even of a comment, because tokenising twice is better than
        # wrong tokens.
        "redraft": hash_key(
            [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
        ),
        "the libraries": [
            f"{name} {importlib.metadata.version(name)}"
            for name in ("transformers", "tokenizers", "jinja2")
        ],
    }


def _spelling(tokenizer: Any) -> Iterator[str]:
    yield type(tokenizer).__name__
    yield json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    if getattr(tokenizer, "is_fast", False):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        # Keep the settings from before this call.
        yield json.dumps(
            {key: value for key, value in backend.items() if key not in ("truncation", "padding")}
        )
    else:
        yield json.dumps(tokenizer.get_vocab(), sort_keys=True)
