"""Measure which settings train a better head than the default settings.

$ python -m benchmarks.studies.recipe                      # EAGLE-3 for SmolLM2, nine hours on two cores
$ python -m benchmarks.studies.recipe --family dflash      # with D-PACE, by speculators' trainer

Every setting trains for the same number of minutes as the default, on the same rows of answers in
the same order for each seed, and its last head is judged on the same held-out questions. The gain
in tau over the default has a 95% interval over questions and seeds; a setting is better if the
interval excludes zero. On two cores, half an hour is enough for only a few steps of the default
size, so all steps have one row of 2,048 tokens, except for the settings of the group `rows`.

table.json has a row for each setting. Once it is measured on a quiet machine, commit it as
benchmarks/studies/recipe.json: a test then fails until the defaults in heads/catalog.py and
heads/options.py are the best settings of the table (`find_unadopted`). After a kill, the same
command continues the study.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.results import write_results
from benchmarks.time_to_tau.bench import (
    HELD_OUT,
    Judged,
    describe,
    judge_course,
    require_same,
    run_course,
    spell,
)
from benchmarks.time_to_tau.course import Course, make_settings
from benchmarks.time_to_tau.curves import estimate, gain_in_tau, last_tau
from benchmarks.time_to_tau.judge import Judge
from benchmarks.time_to_tau.peers import PEERS
from redraft.files.setting_error import require_least
from redraft.recipes import train
from redraft.recipes.cli.run import parse_recipe
from redraft.recipes.demo.parts import ANSWERS, make_target

COMMITTED = Path(__file__).with_name("recipe.json")
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A change of the default settings."""

    group: str
    """Group of the setting. Settings of one group exclude each other, and the best of them may
    become the default.
    """
    flags: tuple[str, ...] = ()
    """Flags of `redraft train`."""
    rows: int = 1
    trainer: str = "redraft"
    against: str = DEFAULT
    """The setting with which this one is compared."""
    settings: tuple[str, ...] = ()
    """Settings of a peer's trainer."""


def _flags(group: str, *flags: str) -> Setting:
    return Setting(group=group, flags=flags)


SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "eagle3": {
        **{
            f"AdamW, {lr}": _flags("optimizer", "--optim.name", "adamw", "--optim.lr", lr)
            for lr in ("5e-4", "1e-3", "2e-3")
        },
        **{f"Muon, {lr}": _flags("optimizer", "--optim.lr", lr) for lr in ("2.5e-4", "1e-3")},
        "momentum 0.8": _flags("momentum", "--optim.momentum", "0.8"),
        "start as the last layer, 2e-3": _flags(
            "start", "--init", "last_layer", "--optim.lr", "2e-3"
        ),
        **{
            f"{steps} draft steps": _flags(
                "steps", "--head.num-steps", steps, "--prove.num-speculative-tokens", "1"
            )
            for steps in ("1", "3", "5")
        },
        "8,192 draft ids": _flags("vocabulary", "--draft-vocab-size", "8192"),
        "all draft ids": _flags("vocabulary", "--draft-vocab-size", "0"),
        "constant rate": _flags("schedule", "--optim.schedule", "constant"),
        "two rows": Setting(group="rows", rows=2),
        "four rows": Setting(group="rows", rows=4),
        "bfloat16": _flags("precision", "--mixed-precision", "bf16"),
    },
    "dflash": {
        **{
            f"{count} anchors": _flags("anchors", "--head.num-anchors", count)
            for count in ("32", "64", "128")
        },
        "gamma 4": _flags("gamma", "--head.gamma", "4"),
        "AdamW, 1e-3": _flags("optimizer", "--optim.name", "adamw", "--optim.lr", "1e-3"),
        "Muon, 1e-3": _flags("optimizer", "--optim.lr", "1e-3"),
        "8,192 draft ids": _flags("vocabulary", "--draft-vocab-size", "8192"),
        "bfloat16": _flags("precision", "--mixed-precision", "bf16"),
        "cross-entropy": _flags("divergence", "--divergence.name", "cross_entropy"),
        "speculators, fixed decay": Setting(
            group="peer",
            trainer="speculators",
            settings=("per_position_loss_weight=fixed-exp-decay",),
        ),
        "speculators, D-PACE": Setting(
            group="peer", trainer="speculators", against="speculators, fixed decay"
        ),
    },
}
"""Settings by family. redraft has no D-PACE, so its gain is measured in speculators' trainer, where
it is the default.
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    family: Literal["eagle3", "dflash"] = "eagle3"
    """Family of the heads."""
    settings: tuple[str, ...] = ()
    """Settings to measure, in addition to the default settings; by default all settings of the
    family.
    """
    minutes: float = 10.0
    """Length of each training run, in minutes."""
    seeds: int = 3
    """Number of training runs for each setting, each with a new seed."""
    sequence_length: int = 2048
    """Length of a row, in tokens."""
    num_questions: int = 64
    """Number of held-out questions on which the heads are judged."""
    max_tokens: int = 128
    """Maximum length of an answer, in tokens."""
    num_speculative_tokens: int = 3
    """Number of draft tokens per step."""
    threads: int = 2
    """Number of threads per training run."""
    target: str | None = None
    """Folder of the target; by default SmolLM2-135M-Instruct, made in --parts."""
    parts: Path = Path("outputs/parts")
    """Folder of the default target."""
    data: str = str(ANSWERS)
    """File with answers of the target."""
    peers: Path | None = None
    """Folder with the packages of other trainers, unless they are installed."""
    output: Path | None = None
    """Folder for table.json and the training runs; by default outputs/recipe/FAMILY."""

    def __post_init__(self) -> None:
        require_least(self, seeds=1, num_questions=2, max_tokens=2, threads=1)
        if not self.minutes > 0:
            raise ValueError(f"--minutes is {self.minutes}: it must be above 0")
        known = SETTINGS[self.family]
        if unknown := set(self.settings) - set(known):
            raise ValueError(f"no setting {min(unknown)!r}: choose from {', '.join(known)}")

    @property
    def folder(self) -> Path:
        return self.output or Path("outputs/recipe") / self.family

    @property
    def chosen(self) -> dict[str, Setting]:
        """Return the settings to measure and their baselines, by name."""
        known = {DEFAULT: Setting(group=""), **SETTINGS[self.family]}
        names = self.settings or tuple(SETTINGS[self.family])
        wanted = {DEFAULT, *names, *(known[name].against for name in names)}
        return {name: setting for name, setting in known.items() if name in wanted}


def main(cfg: Config) -> None:
    """Train, judge, and write the table after every training run.

    Raises:
        ValueError: a package is missing, or --output contains training runs with different
            settings.
    """
    target = cfg.target or str(make_target(cfg.parts))
    courses = {}
    for seed in range(cfg.seeds):
        for name, setting in cfg.chosen.items():
            if (peer := PEERS.get(setting.trainer)) is not None:
                peer.require(cfg.family, cfg.peers)
            course = courses[seed, name] = make_course(cfg, target, name, setting, seed)
            make_settings(course)
            require_same(course)
    judge = Judge(
        target=target, data=cfg.data, held_out=HELD_OUT, num_questions=cfg.num_questions,
        max_tokens=cfg.max_tokens, tokens=cfg.num_speculative_tokens, folder=cfg.folder / "judged",
    )  # fmt: skip
    judged: dict[str, list[Judged]] = {name: [] for name in cfg.chosen}
    for number, ((seed, name), course) in enumerate(courses.items(), 1):
        print(f"\n{number} of {len(courses)}: {name}, seed {seed}", flush=True)
        judged[name].append(judge_course(judge, run_course(course), engine=False))
        rows = make_table(cfg.family, judged)
        content = {
            "family": cfg.family,
            "target": Path(target).name,
            "command": shlex.join(["python", "-m", "benchmarks.studies.recipe", *sys.argv[1:]]),
            "minutes": cfg.minutes,
            "seeds": cfg.seeds,
            "rows": rows,
        }
        write_results(cfg.folder / "table.json", content)
        print(*map(describe_row, rows), sep="\n", flush=True)


def make_course(cfg: Config, target: str, name: str, setting: Setting, seed: int) -> Course:
    folder = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return Course(
        trainer=setting.trainer, family=cfg.family, target=target, data=cfg.data,
        held_out=HELD_OUT, minutes=cfg.minutes, every_minutes=cfg.minutes, seed=seed,
        sequence_length=cfg.sequence_length, rows=setting.rows, threads=cfg.threads,
        flags=setting.flags, settings=setting.settings,
        peers=str(cfg.peers.absolute()) if cfg.peers else None,
        tokens=str(cfg.folder / "tokens"), output=str(cfg.folder / f"{folder}-{seed}"),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------
# the table


def make_table(family: str, judged: Mapping[str, Sequence[Judged]]) -> list[dict[str, Any]]:
    """Return a row for each trained setting, with its tau and its gain over its baseline."""
    curves = {name: [run.curve for run in runs] for name, runs in judged.items() if runs}
    known = {DEFAULT: Setting(group=""), **SETTINGS[family]}
    rows = []
    for name, own in curves.items():
        setting = known[name]
        row: dict[str, Any] = {
            "setting": name,
            **asdict(setting),
            "tau": describe(estimate(last_tau, own)),
            "labels": [int(curve.last_label) for curve in own],
            "gain": None,
        }
        if name != DEFAULT and setting.against in curves:
            other = curves[setting.against]
            both = min(len(own), len(other))
            row["gain"] = describe(estimate(gain_in_tau, own[:both], other[:both]))
        rows.append(row)
    return rows


def describe_row(row: Mapping[str, Any]) -> str:
    gain = "" if row["gain"] is None else f"  {spell(row['gain'])} over {row['against']}"
    return f"{row['setting']:32} {spell(row['tau'])}{gain}"


def find_unadopted(table: Mapping[str, Any]) -> list[str]:
    """Find the settings that the table proves better than the default, but that are not defaults.

    In each group, only the best setting counts. Settings without flags of `redraft train` cannot
    become defaults.
    """
    best: dict[str, Mapping[str, Any]] = {}
    for row in table["rows"]:
        gain = row["gain"]
        if gain is None or gain["low"] is None or gain["low"] <= 0 or not row["flags"]:
            continue
        if row["group"] not in best or gain["value"] > best[row["group"]]["gain"]["value"]:
            best[row["group"]] = row
    return [
        row["setting"] for row in best.values() if not is_default(table["family"], row["flags"])
    ]


def is_default(family: str, flags: Sequence[str]) -> bool:
    """Whether these flags equal the defaults of `redraft train`."""
    recipe, _ = train.choose_recipe([family], "redraft train")
    return bool(parse_recipe(recipe, flags) == parse_recipe(replace(recipe), []))


if __name__ == "__main__":
    from redraft.recipes.cli.run import run_recipe

    run_recipe(main, Config, __doc__)
