"""Weights that a trainer names by path.

The files must be within the allowed folders, and complete before they are loaded.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from redraft.files.artifact import safetensors_header
from redraft.files.folder import read_config, tensor_files

CHUNK_BYTES = 16 << 20
OPTIONAL = ("lm_head.weight", "rotary_emb.inv_freq")
"""Suffixes of tensor names that a tied or older model may lack, or contain in addition."""


class OutsideError(ValueError):
    """Raised when a path is outside the allowed folders."""


def list_files(path: Path, roots: Iterable[Path]) -> list[Path]:
    """List the file at `path`, or the files in that folder, by resolved path. No file is opened.

    Raises:
        FileNotFoundError: there is no such file or folder.
        OutsideError: one of the files is outside `roots`.
        ValueError: one of them is neither a file nor a folder, e.g. a pipe that would never
            end.
    """
    resolved = path.resolve()
    allowed = [root.resolve() for root in roots]
    _require_within(resolved, path, allowed)
    files = []
    for entry in sorted(resolved.iterdir()) if resolved.is_dir() else [resolved]:
        found = entry.resolve()
        _require_within(found, entry, allowed)
        if found.is_file():
            files.append(entry)
        elif not found.exists():
            raise FileNotFoundError(f"{entry} does not exist")
        elif not found.is_dir():
            raise ValueError(f"{entry} is not a regular file: remove it")
    return files


def _require_within(found: Path, named: Path, allowed: list[Path]) -> None:
    if not any(found.is_relative_to(root) for root in allowed):
        raise OutsideError(
            f"{named} is outside the folders of `redraft serve --targets`: restart the server to allow it"
        )


def read_through(files: Iterable[Path]) -> None:
    """Read every byte of the files once.

    Storage that hangs then does so here, and not in a pause. The pause reads the files from the
    machine's memory, as far as they fit there.
    """
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def describe_tensors(files: Iterable[Path]) -> dict[str, str]:
    """Return the shape and dtype of each tensor in safetensors files, by name.

    Raises:
        ValueError: a file is truncated or corrupt.
    """
    return {
        name: describe(entry) for path in files for name, entry in safetensors_header(path).items()
    }


# Loading converts float dtypes, but an integer would be read as a different number.
FLOATS = ("F64", "F32", "F16", "BF16")


def describe(entry: Mapping[str, object]) -> str:
    """Describe a tensor's shape and dtype, from its entry in a safetensors header."""
    return f"{entry['shape']} of {'floats' if entry['dtype'] in FLOATS else entry['dtype']}"


def describe_target(folder: Path) -> dict[str, str]:
    """Return `describe_tensors` for all tensors that an update of a target must contain.

    Raises:
        FileNotFoundError: there are no weights in safetensors.
        ValueError: a file is truncated or corrupt.
    """
    tensors = describe_tensors(sorted(set(tensor_files(folder).values())))
    is_tied = bool(read_config(folder).get("tie_word_embeddings"))
    return {name: text for name, text in tensors.items() if not (is_tied and _is_optional(name))}


def require_whole(found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Refuse weights with missing or extra tensors, or with shapes other than the model's.

    vLLM notices this only after it has begun to load, and then leaves layers partly updated.

    Raises:
        ValueError: the weights differ from the model's.
    """
    different = sorted(
        name
        for name in found.keys() | wanted.keys()
        if found.get(name) != wanted.get(name) and not (name not in wanted and _is_optional(name))
    )
    if different:
        name = different[0]
        raise ValueError(
            f"the weights differ from the model's in {len(different)} tensors ({name} is "
            f"{found.get(name, 'absent')} instead of {wanted.get(name, 'absent')}): give all "
            "tensors, in any number of updates"
        )


def _is_optional(name: str) -> bool:
    return name.endswith(OPTIONAL)
