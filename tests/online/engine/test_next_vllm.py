"""The names of vLLM that the plugin touches are in the next vLLM too.

That has no CPU build to run.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vllm_names
from vllm_names import Vllm

from redraft.engine import counters

VERSION = "0.33.0"
SHA256 = "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"
"""Of the wheel for x86-64."""

SOURCES = Path(sys.prefix) / f"vllm-{VERSION}"
"""The Python files of the wheel, unpacked once."""


@functools.cache
def unpack() -> str:
    """Download and unpack the wheel unless it is there. Returns what went wrong."""
    with SOURCES.with_name(f".{SOURCES.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if SOURCES.is_dir():
            return ""
        partial = SOURCES.with_name(f".{SOURCES.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        asked = partial / "requirements.txt"
        asked.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        command += [
            "--require-hashes",
            "--platform=manylinux_2_28_x86_64",
            "--dest",
            str(partial),
            "-r",
            str(asked),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        (wheel,) = partial.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                partial, [name for name in archive.namelist() if name.endswith(".py")]
            )
        wheel.unlink()
        partial.rename(SOURCES)
        return ""


@pytest.fixture(scope="module")
def next_vllm() -> Vllm:
    if problem := unpack():
        pytest.skip(f"the wheel of vLLM {VERSION} cannot be had: {problem}")
    return Vllm(SOURCES / "vllm")


@pytest.fixture(scope="module")
def installed_vllm() -> Vllm:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Vllm(Path(spec.submodule_search_locations[0]))


@pytest.mark.slow
def test_the_installed_vllm_has_everything_that_the_plugin_touches(installed_vllm):
    assert installed_vllm.lacks() == []


@pytest.mark.slow
def test_the_next_vllm_has_everything_that_the_plugin_touches(next_vllm):
    assert next_vllm.lacks() == []


@pytest.mark.slow
def test_the_next_vllm_takes_the_same_parameters(next_vllm, installed_vllm):
    assert next_vllm.changed(installed_vllm) == []


@pytest.mark.slow
def test_the_next_vllm_has_no_medusa(next_vllm, installed_vllm):
    """`redraft serve` refuses it by the table of families.

    If vLLM had it again, it should not.
    """
    files = [
        "v1/spec_decode/medusa.py",
        "model_executor/models/medusa.py",
    ]
    assert [file for file in files if (next_vllm.folder / file).is_file()] == []
    assert (installed_vllm.folder / files[0]).is_file()


# --- the check itself


def test_what_the_hooks_touch_is_read_from_their_source():
    touched = {
        (file.rpartition("/")[2], expression)
        for file, expression, _, _ in vllm_names.list_attributes()
    }
    assert ("runner_v1.py", "runner.input_batch.num_computed_tokens_cpu") in touched
    assert ("copies.py", "runner.speculator._draft_scatter_buf") in touched  # by getattr
    assert ("feed.py", "request.prompt_token_ids") in touched
    assert ("swap_transaction.py", "engine.pause_generation") in touched
    assert ("swap.py", "runner.get_draft_model") in touched
    assert ("lookup_first.py", "self.ngrams.propose") in touched
    assert len(touched) > 90


SOURCE = {
    "__init__.py": "",
    "base.py": "class Base:\n    step: int\n    def wait(self, seconds, *, is_long=False): ...\n",
    "names.py": "from .base import Base as Parent\nfrom .base import *\n",
    "engine.py": "from vllm.names import Parent\nclass Engine(Parent):\n    def start(self):\n     "
    "   self.ready = 1\n",
}


@pytest.fixture
def small(tmp_path):
    for name, text in SOURCE.items():
        (tmp_path / name).write_text(text)
    return Vllm(tmp_path)


def test_members_and_signatures_are_found_through_bases_and_imports(small):
    assert {"ready", "step", "wait"} <= small.members("engine:Engine")
    assert "missing" not in small.members("engine:Engine")
    assert ast.unparse(small.signature("engine:Engine.wait")) == "self, seconds, *, is_long=False"
    assert small.signature("engine:Engine.missing") is None
    assert small._has_import("names.Base")
    assert not small._has_import("names.Missing")
    assert not small._has_import("missing.Base")


@pytest.mark.parametrize(
    ("new", "is_accepted"),
    [
        ("self, seconds, *, is_long=False", True),
        ("self, seconds, unit='s', *, is_long=False, others=()", True),
        ("self, seconds, is_long=False", True),
        ("self, unit, seconds, *, is_long=False", False),
        ("self, time, *, is_long=False", False),
        ("self, seconds, unit, *, is_long=False", False),
        ("self, seconds", False),
        ("self, seconds, *, is_long=False, others", False),
    ],
)
def test_a_parameter_that_is_moved_or_gone_is_told(small, tmp_path, new, is_accepted, monkeypatch):
    monkeypatch.setattr(vllm_names, "CALLABLES", ("base:Base.wait",))
    later = tmp_path / "later"
    later.mkdir()
    (later / "base.py").write_text(f"class Base:\n    def wait({new}): ...\n")
    assert (Vllm(later).changed(small) == []) is is_accepted


def test_what_is_not_there_is_told(small):
    missing = small.lacks()
    assert any("runner_v1.py: runner.input_batch.req_ids" in line for line in missing)
    assert "no v1.worker.gpu_model_runner:GPUModelRunner._sample" in missing
    assert any(line.startswith("no vllm:spec_decode_num_drafts in ") for line in missing)
    assert any("swap.py: config.set_current_vllm_config" in line for line in missing)
    assert "no distributed.device_communicators.shm_broadcast:sched_yield" in missing
    assert "no vllm:request_decode_time_seconds in v1/metrics/loggers.py" in missing


def test_every_file_of_the_plugin_and_every_counter_is_checked():
    """A new file needs a line in OBJECTS, a new counter one in TEXTS."""
    assert {file for file, _ in vllm_names.list_imports()} <= vllm_names.OBJECTS.keys()
    texts = [text.strip('"') for texts in vllm_names.TEXTS.values() for text in texts]
    read = [
        name
        for name in vars(counters).values()
        if isinstance(name, str) and name.startswith("vllm:")
    ]
    stems = [name.removesuffix("_total").rstrip("_") for name in read]
    assert [stem for stem in stems if not any(text.startswith(stem) for text in texts)] == []
    assert len(stems) >= 4
