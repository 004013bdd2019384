"""Ask pip-audit about every package of the lock files.

    python requirements/audit.py [PIP_AUDIT] [--osv-url URL]

Exit status: 0, every package was looked up and nothing is known; 1, something is; 2, not every
package was looked up. pip-audit itself reports "no known vulnerabilities" for packages that the
service does not know, and ends well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from licences import Package, read_locks


def split_rounds(packages: Sequence[Package]) -> list[list[Package]]:
    """The packages in rounds with one version of each: pip-audit takes no more."""
    rounds: list[dict[str, Package]] = []
    for package in packages:
        for names in rounds:
            if package.name not in names:
                names[package.name] = package
                break
        else:
            rounds.append({package.name: package})
    return [list(names.values()) for names in rounds]


def ask(command: Sequence[str], packages: Sequence[Package]) -> tuple[list[dict[str, Any]], str]:
    """pip-audit's entry for each package, and why there are none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{package.name}=={package.version}\n" for package in packages))
        file.flush()
        options = [
            "--no-deps",
            "--disable-pip",
            "--progress-spinner",
            "off",
            "--format",
            "json",
            "-r",
            file.name,
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    try:
        entries: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
        return entries, ""
    except (ValueError, KeyError, TypeError):
        return [], (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]


def judge(
    packages: Sequence[Package], entries: Sequence[dict[str, Any]], reason: str
) -> tuple[int, list[str]]:
    """The exit status, and a line for each finding."""
    found = [
        f"{entry['name']} {entry['version']}: {each['id']}, fixed in "
        f"{', '.join(each['fix_versions']) or 'no release'}"
        for entry in entries
        for each in entry.get("vulns", ())
    ]
    num_known = sum("vulns" in entry for entry in entries)
    skipped = next(
        (entry["skip_reason"] for entry in entries if "skip_reason" in entry), reason or "no answer"
    )
    if num_known < len(packages):
        why = (
            f"audit: NOT DONE for {len(packages) - num_known} of {len(packages)} packages: "
            f"{skipped}"
        )
        return 1 if found else 2, [*found, why]
    return bool(found), found or [f"audit: {num_known} packages, no known vulnerability"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pip_audit", nargs="?", default=".venv-audit/bin/pip-audit")
    parser.add_argument(
        "--osv-url", help="a mirror of https://api.osv.dev/v1/query; by default PyPI is asked"
    )
    args = parser.parse_args()
    command = [args.pip_audit, *(["-s", "osv", "--osv-url", args.osv_url] if args.osv_url else [])]
    packages = read_locks()
    entries, reason = [], ""
    for part in split_rounds(packages):
        answered, failure = ask(command, part)
        entries, reason = entries + answered, reason or failure
    status, lines = judge(packages, entries, reason)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
