"""`make check-deps`.

The page of licences is the lock files', and an audit that did not take place does not pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "requirements"))
import audit  # noqa: E402
import licences  # noqa: E402
from licences import Package  # noqa: E402

ONE, OTHER = Package("jinja2", "3.1.6"), Package("torch", "2.13.0")
KNOWN = [{"name": p.name, "version": p.version, "vulns": []} for p in (ONE, OTHER)]
SKIPPED = {
    "name": "torch",
    "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0)",
}
FLAW = {"id": "PYSEC-2030-1", "fix_versions": ["3.1.7"], "aliases": [], "description": ""}


def test_the_page_lists_every_locked_package_with_its_licence() -> None:
    packages, page = licences.read_locks(), licences.parse_page(licences.PAGE.read_text())
    assert len(packages) > 200
    assert list(licences.find_differences(packages, page)) == []
    direct = licences.read_direct()
    assert {"torch", "msgspec", "nats-py", "vllm", "pytest"} <= direct
    assert direct - {p.name for p in packages} == {"liger-kernel"}, "an extra that no lock installs"


def test_the_page_is_read_as_it_was_written() -> None:
    found = {
        ONE: "BSD-3-Clause",
        OTHER: "LicenseRef-Proprietary",
        Package("uv", "1.0.post1"): "MIT OR Apache-2.0",
    }
    text = licences.write_page(found, {"torch"})
    assert licences.parse_page(text) == found
    assert "**torch** 2.13.0" in text
    assert text.index("LicenseRef") < text.index("BSD"), "those to look at come first"


def test_a_package_that_is_missing_superfluous_or_of_another_licence_is_told() -> None:
    here = licences.Package("msgspec", licences.metadata.version("msgspec"))
    page = {here: "GPL-3.0-only", OTHER: "BSD-3-Clause"}
    assert list(licences.find_differences([here, ONE], page)) == [
        f"msgspec {here.version} is BSD-3-Clause, and the page says GPL-3.0-only",
        "jinja2 3.1.6 is locked, but not on the page",
        "torch 2.13.0 is on the page, but not locked",
    ]


@pytest.mark.parametrize(
    ("expression", "classifiers", "text", "expected"),
    [
        ("MIT OR Apache-2.0", ["License :: OSI Approved :: MIT License"], "", "MIT OR Apache-2.0"),
        (None, ["License :: OSI Approved :: Apache Software License"], "whatever", "Apache-2.0"),
        (None, ["License :: Other/Proprietary License"], "", "LicenseRef-Proprietary"),
        (None, [], "Apache License, Version 2.0", "Apache-2.0"),
        (None, [], "3-Clause BSD License", "BSD-3-Clause"),
        (None, ["License :: OSI Approved :: MIT License", "License :: OSI Approved :: Apache Software License"], "",
         "Apache-2.0 or MIT"),
        (None, [], "Copyright (c) somebody", None),
        (None, [], "", None),
    ],
)  # fmt: skip
def test_the_ways_to_name_a_licence(
    expression: str | None, classifiers: list[str], text: str, expected: str | None
) -> None:
    assert licences.to_spdx(expression, classifiers, text) == expected


def test_an_audit_that_knows_nothing_of_a_package_is_not_done() -> None:
    assert audit.judge([ONE, OTHER], KNOWN, "") == (
        0,
        ["audit: 2 packages, no known vulnerability"],
    )
    status, (line,) = audit.judge([ONE, OTHER], [KNOWN[0], SKIPPED], "")
    assert (status, line) == (2, f"audit: NOT DONE for 1 of 2 packages: {SKIPPED['skip_reason']}")
    status, (line,) = audit.judge([ONE, OTHER], [], "Max retries exceeded")
    assert (status, line) == (2, "audit: NOT DONE for 2 of 2 packages: Max retries exceeded")
    flawed = KNOWN[0] | {"vulns": [FLAW]}
    assert audit.judge([ONE, OTHER], [flawed, KNOWN[1]], "") == (
        1,
        ["jinja2 3.1.6: PYSEC-2030-1, fixed in 3.1.7"],
    )
    status, lines = audit.judge([ONE, OTHER], [flawed, SKIPPED], "")
    assert (status, len(lines)) == (1, 2)


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        ('{"dependencies": []}', 2, "NOT DONE"),
        ("", 2, "NOT DONE .* no route to host"),
        ("<html>", 2, "NOT DONE"),
        ("all", 0, "no known vulnerability"),
    ],
)
def test_the_command_passes_on_nothing_but_a_whole_answer(
    answer: str, status: int, told: str, tmp_path: Path
) -> None:
    """With a stand-in for pip-audit: the advisory service is not reached from everywhere."""
    stand_in = tmp_path / "pip-audit"
    stand_in.write_text(f"""#!{sys.executable}
import json, sys
if {answer!r} == "all":
    lines = open(sys.argv[-1]).read().split()
    names = [line.split("==") for line in lines]
    assert len({{name for name, _ in names}}) == len(names)
    print(json.dumps({{"dependencies": [{{"name": n, "version": v, "vulns": []}} for n, v in names]}}))
else:
    print({answer!r})
    sys.exit("no route to host")
""")
    stand_in.chmod(0o755)
    command = [sys.executable, str(ROOT / "requirements" / "audit.py"), str(stand_in)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert re.search(told, done.stdout)
