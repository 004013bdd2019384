"""Find the files of a folder that belong to a split, from its dataset card or from their names."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from redraft.files.setting_error import SettingError

WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Splits by the words that stand for them in file or folder names, as in the library `datasets`."""

CARD = "README.md"
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(-[0-9a-f]{16})?")
"""Pattern of a file name written by the library `datasets`. The whole part before the numbers is
its split.
"""


def choose_files(
    folder: Path, files: Sequence[Path], split: str
) -> tuple[list[Path], Counter[str]]:
    """Return the `files` of a folder that belong to `split`, and count the others by split.

    A file that belongs to no split is included in every split.

    Raises:
        ValueError: the folder has splits but not this one, or has several configs.
    """
    declared = _declared(folder, files)
    named: dict[Path, str | None] = {**declared} or {
        file: _name_split(file.relative_to(folder), split) for file in files
    }
    splits = Counter(name for name in named.values() if name)
    found = find_split(split, splits)
    chosen = [file for file, name in named.items() if name in (found, None)]
    if not chosen and (declared or len(splits) > 1):
        raise SettingError(
            f"{folder} has no split {split}, only {', '.join(splits)}: choose one with {{split}}, "
            "or give its files"
        )
    if not chosen:  # the files of a single split are read, whatever its name is
        return list(files), Counter()
    splits.pop(found or "", None)
    return chosen, splits


def find_split(asked: str, splits: Collection[str]) -> str | None:
    """Return the requested split, or otherwise the only split of its kind, e.g.

    `train` for `train_sft`.
    """
    alike = [name for name in splits if _find_word(name) == _find_word(asked)]
    return asked if asked in splits else alike[0] if len(alike) == 1 else None


def is_split(name: str) -> bool:
    return _find_word(name) is not None


def _name_split(path: Path, asked: str) -> str | None:
    """Return the split in a file's name, or otherwise in the name of a folder above it.

    Return `asked` if the name begins with it.
    """
    file = path.name.partition(".")[0]
    if (shard := SHARD.fullmatch(file)) and _find_word(shard[1]):
        return shard[1]
    for name in (file, *reversed(path.parts[:-1])):
        if re.fullmatch(rf"{re.escape(asked)}([-_ \d].*)?", name, re.I):
            return asked
        if found := _find_word(name):
            return found
    return None


def _find_word(name: str) -> str | None:
    """Return the split at the start or end of a name, as in `test-00000-of-00002` or `my_dev`."""
    words = [word for word in re.split(r"[-_. \d]+", name.lower()) if word]
    found = (WORDS[word] for word in (*words[:1], *words[-1:]) if word in WORDS)
    return next(found, None)


def _declared(folder: Path, files: Sequence[Path]) -> dict[Path, str]:
    """Return the split of each file that the folder's card declares."""
    configs = _read_configs(folder / CARD)
    if not configs:
        return {}
    names = [str(config.get("config_name", "default")) for config in configs]
    main = [
        config
        for config, name in zip(configs, names, strict=True)
        if len(configs) == 1 or name == "default" or config.get("default") is True
    ]
    if not main:
        raise ValueError(
            f"{folder} has the configs {', '.join(names)}: choose one with {folder}:CONFIG"
        )
    base = folder / str(main[0].get("data_dir") or "")
    found: dict[Path, str] = {}
    for split, pattern in _patterns(main[0]["data_files"]):
        if not pattern or Path(pattern).is_absolute():
            raise ValueError(
                f"{folder / CARD} declares {pattern!r}, which is not a path in the folder"
            )
        found |= dict.fromkeys(base.glob(pattern), split)
    return {file: found[file] for file in files if file in found}


def _read_configs(card: Path) -> list[dict[str, Any]]:
    if not card.is_file():
        return []
    # Imported here, because it takes 0.1 s, too long for --help.
    from huggingface_hub import metadata_load

    try:
        configs = (metadata_load(card) or {}).get("configs")
    except Exception:  # the file is not a dataset card, because its YAML or its encoding is invalid
        return []
    found = configs if isinstance(configs, list) else []
    return [one for one in found if isinstance(one, dict) and one.get("data_files")]


def _patterns(files: Any) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern) for a config's `data_files`: one pattern, or several with splits."""
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    for entry in files if isinstance(files, list) else [files]:
        split, paths = "train", entry
        if isinstance(entry, dict):
            split, paths = str(entry.get("split", "train")), entry.get("path", [])
        for path in paths if isinstance(paths, list) else [paths]:
            yield split, str(path).removeprefix("./")
