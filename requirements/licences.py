"""Check that docs/licences.md lists every package of the lock files, or write it.

    python requirements/licences.py             exit status 1 if the page lacks a package, or names another licence
    python requirements/licences.py --write     write the page; asks PyPI about packages that are not installed here

A licence is read from the installed package if that is the locked release. Otherwise PyPI is asked
about the locked release, or about the newest if the index does not know the locked one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "licences.md"
LOCKS = ("cpu", "cuda", "image", "log", "uv", "audit", "torch-cpu")
PYPI = "https://pypi.org/pypi"

SPDX = {
    "academic free license (afl)": "AFL-3.0",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache software": "Apache-2.0",
    "apache software 2.0": "Apache-2.0",
    "apache, version 2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "isc": "ISC",
    "isc (iscl)": "ISC",
    "mit": "MIT",
    "mozilla public 2.0 (mpl 2.0)": "MPL-2.0",
    "other/proprietary": "LicenseRef-Proprietary",
    "python software foundation": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "unlicense": "Unlicense",
}
"""Names that people give to licences, in lower case and without the word licence."""

BY_HAND = {
    "cuda-toolkit": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cudnn-cu13": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-cusparselt-cu13": "LicenseRef-NVIDIA-Proprietary",
    "nvidia-nccl-cu13": "BSD-3-Clause",
    "nvidia-nvshmem-cu13": "LicenseRef-NVIDIA-Proprietary",
    "oss-harmony": "Apache-2.0",  # the text in the wheel, as for the next two
    "quack-kernels": "Apache-2.0",
    "torchcodec": "BSD-3-Clause",
    "supervisor": "LicenseRef-repoze",  # "BSD-derived", with a clause on trademarks
}
"""Packages whose metadata names no licence, or a text of their makers."""

PERMISSIVE = re.compile(
    r"(MIT|Apache-2\.0|BSD|0BSD|ISC|PSF|Unlicense|CC0|Zlib|HPND|BSL-1|AFL|CNRI|Python-2)"
)

HEAD = """# Licences of the packages that redraft installs
`python requirements/licences.py --write` generates this page from the lock files and package
metadata, and `make check-deps` checks it. Packages in **bold** are named in pyproject.toml; all
others are their dependencies. redraft itself is licensed under Apache-2.0. Licences that need a
closer look come first.

"""


@dataclass(frozen=True)
class Package:
    name: str
    version: str


def read_locks() -> list[Package]:
    """Every package and version of the lock files."""
    lines = (line for lock in LOCKS for line in (HERE / f"{lock}.txt").read_text().splitlines())
    pinned = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*\])?==([^\s;\\]+)", line) for line in lines)
    return sorted(
        {Package(normal(m[1]), m[2]) for m in pinned if m}, key=lambda p: (p.name, p.version)
    )


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_direct() -> set[str]:
    """Names in pyproject.toml."""
    text = (
        (HERE.parent / "pyproject.toml")
        .read_text()
        .partition("dependencies = [")[2]
        .partition("[project.scripts]")[0]
    )
    return {
        normal(name) for name in re.findall(r'"([A-Za-z0-9._-]+)(?:\[\w+\])?(?:[<>=]=|")', text)
    }


def to_spdx(expression: str | None, classifiers: list[str], text: str) -> str | None:
    """The licence as an SPDX expression, from the first that says.

    The expression, the classifiers, the free text.
    """
    if expression:
        return expression
    names = [c.rpartition(" :: ")[2] for c in classifiers if c.startswith("License :: ")]
    found = [SPDX[key] for name in names if (key := _simplify(name)) in SPDX]
    if len(found) == 1:  # several: all or any of them? The text says
        return found[0]
    line = text.strip().splitlines()[0] if text.strip() else ""
    if (
        re.fullmatch(r"[A-Za-z0-9.-]+( (OR|AND) [A-Za-z0-9.-]+)*", line)
        and _simplify(line) not in SPDX
    ):
        return line
    return SPDX.get(_simplify(line)) or " or ".join(sorted(found)) or None


def _simplify(name: str) -> str:
    return (
        re.sub(
            r"\s+", " ", re.sub(r"\blicen[cs]e\b", "", name.lower().replace("licence", "license"))
        )
        .strip()
        .replace(" ,", ",")
    )


def read_installed(package: Package) -> str | None:
    try:
        found = metadata.metadata(package.name)
    except metadata.PackageNotFoundError:
        return None
    if found["Version"].partition("+")[0] != package.version:
        return None
    return to_spdx(
        found.get("License-Expression"),
        found.get_all("Classifier") or [],
        found.get("License") or "",
    )


def ask_pypi(package: Package) -> str | None:
    for path in (f"{package.name}/{package.version}", package.name):
        try:
            with urllib.request.urlopen(f"{PYPI}/{path}/json", timeout=30) as answer:
                info = json.load(answer)["info"]
            return to_spdx(
                info.get("license_expression"),
                info.get("classifiers") or [],
                info.get("license") or "",
            )
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
    return None


def parse_page(text: str) -> dict[Package, str]:
    """The licence of each package on the page."""
    found = {}
    for row in re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)[1:]:
        for name, version in re.findall(r"\**([a-z0-9-]+)\** ([^,\s]+)", row[1]):
            found[Package(name, version)] = row[0]
    return found


def write_page(licences: Mapping[Package, str], direct: set[str]) -> str:
    rows = sorted(set(licences.values()), key=lambda name: (bool(PERMISSIVE.match(name)), name))
    text = HEAD + "| licence | packages |\n|---|---|\n"
    for licence in rows:
        listed = [p for p in licences if licences[p] == licence]
        names = [
            f"**{p.name}** {p.version}" if p.name in direct else f"{p.name} {p.version}"
            for p in listed
        ]
        text += f"| {licence} | {', '.join(names)} |\n"
    return text


def find_differences(packages: list[Package], page: Mapping[Package, str]) -> Iterator[str]:
    for package in packages:
        if package not in page:
            yield f"{package.name} {package.version} is locked, but not on the page"
        elif (here := BY_HAND.get(package.name) or read_installed(package)) and here != page[
            package
        ]:
            yield f"{package.name} {package.version} is {here}, and the page says {page[package]}"
    yield from (
        f"{p.name} {p.version} is on the page, but not locked" for p in page if p not in packages
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    packages = read_locks()
    if parser.parse_args().write:
        licences = {p: BY_HAND.get(p.name) or read_installed(p) or ask_pypi(p) for p in packages}
        if unknown := [p.name for p, licence in licences.items() if not licence]:
            print(
                f"no licence is known of {', '.join(unknown)}: look it up and add it to BY_HAND in "
                f"{__file__}"
            )
            return 1
        PAGE.write_text(
            write_page({p: licence for p, licence in licences.items() if licence}, read_direct())
        )
        return 0
    differences = list(find_differences(packages, parse_page(PAGE.read_text())))
    print(
        "\n".join(differences)
        or f"licences: {len(packages)} packages, all in {PAGE.relative_to(HERE.parent)}"
    )
    if differences:
        print("write the page again: python requirements/licences.py --write")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
