"""Check a draft against its target before it is served, or without one this environment.

$ redraft doctor                                            # versions, devices, engine, disk
$ redraft doctor --target TARGET --draft DRAFT              # does serving see what training saw?
$ redraft doctor --target TARGET --draft DRAFT --no-engine  # in seconds: configs, tensors and provenance only

Every problem is a line with its cure. Exit status 1 where there is one, 2 for what cannot be read, 0 otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eval.machine import describe, diagnose, gather
from heads.finding import Finding
from recipes.cli import run_recipe

Method = Literal["draft_model", "eagle", "eagle3", "medusa", "mtp"]


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str | None = None
    """Folder or hub name of the model that is served; of one with an MTP layer of its own, the draft too."""
    draft: str | None = None
    """Folder or hub name of the draft to check."""
    method: Method | None = None
    """vLLM's method that you serve it with; by default the one of its family."""
    num_speculative_tokens: int | None = None
    """Tokens drafted at once; by default as many as its training was judged with, or 3."""
    engine: bool = True
    """Run the draft in the real vLLM; without a draft, import vLLM."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of that run; by default float32 on a CPU and bfloat16 on a GPU."""
    prompts: str | None = None
    """Data whose prompts the engine answers (as --data.source of distill); by default what training held out."""
    num_prompts: int = 16
    max_tokens: int = 64
    """Of each answer."""
    output: Path = Path("outputs")
    """Where runs will be written: the disk to check, and the place of the engine's log."""


def main(cfg: Config) -> None:
    findings = check_environment(cfg) if cfg.draft is None and cfg.target is None else check_pair(cfg)
    print(verdict(findings))
    if findings:
        raise SystemExit(1)


def check_environment(cfg: Config) -> list[Finding]:
    facts = gather(cfg.output, import_engine=cfg.engine)
    print(describe(facts))
    return diagnose(facts)


def check_pair(cfg: Config) -> list[Finding]:
    """Raises: ValueError, FileNotFoundError where a folder is missing or holds no draft."""
    from distill.check_draft import EngineCheck, check_draft  # torch, which an environment may lack

    if cfg.target is None:
        raise ValueError(f"--draft {cfg.draft} is checked against its target: give --target too")
    engine = EngineCheck(
        dtype=cfg.dtype,
        prompts=cfg.prompts,
        num_prompts=cfg.num_prompts,
        max_tokens=cfg.max_tokens,
        folder=cfg.output / "doctor",
    )
    checked = check_draft(
        cfg.target,
        cfg.draft or cfg.target,
        method=cfg.method,
        num_speculative_tokens=cfg.num_speculative_tokens,
        engine=engine if cfg.engine else None,
    )
    for name, value in checked.facts.items():
        print(f"{name:<14}{value}")
    for note in checked.notes:
        print(f"{'note':<14}{note}")
    return checked.findings


def verdict(findings: Sequence[Finding]) -> str:
    """The findings with their cures, or that there are none."""
    if not findings:
        return "\nEverything fits."
    lines = [f"\n{len(findings)} problem{'s' if len(findings) > 1 else ''}:"]
    for finding in findings:
        lines += [f"  {finding.problem}", f"    cure: {finding.cure}"]
    return "\n".join(lines)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
