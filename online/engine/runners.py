"""Find the model runner that a worker has, and install the hooks for it."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from redraft.heads.catalog import find_method
from redraft.online.engine import runner_v1, runner_v2
from redraft.online.engine.capture import Capture
from redraft.online.engine.reread import Rereader
from redraft.online.engine.worker_hooks import reread_before_steps

Runner = Literal["v1", "v2"]

MODULES: dict[Runner, Any] = {"v1": runner_v1, "v2": runner_v2}
"""Modules by the runner they hook into. Each has `RUNNER` (the name of vLLM's class),
`install_capture`, `install_proposers` and `find_proposer`.
"""


LOSSLESS = ("standard", "block")
"""vLLM's verification methods that preserve the target's answers. Later releases also have lossy
methods.
"""


def find_runner(runner: object) -> Runner | None:
    """Return which of vLLM's runners this is. The CPU runners are derived from them.

    Return None for any other runner.
    """
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(runner).__mro__}
    return next((version for version, module in MODULES.items() if module.RUNNER in names), None)


def describe_runner(
    version: Runner | None, vllm_config: Any, environment: Mapping[str, str] = os.environ
) -> str:
    """Describe in one line which model runner serves and, if it is not V2, why."""
    if version is None:
        return "unknown model runner"
    return (
        "V2 model runner"
        if version == "v2"
        else f"V1 model runner: {_explain_v1(vllm_config, environment)}"
    )


def _explain_v1(vllm_config: Any, environment: Mapping[str, str]) -> str:
    if environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "VLLM_USE_V2_MODEL_RUNNER=0"
    speculative = vllm_config.speculative_config
    parallel = bool(speculative and speculative.parallel_drafting)
    family = find_method(speculative.method, parallel_drafting=parallel) if speculative else None
    if family is not None and "v2" not in family.decoders:
        return f"only this runner serves {family.title}"
    # These are PARD and other drafts that have no row in the catalog. DFlash and DSpark draft in
    # parallel too, but V2 serves them (vllm/config/vllm.py).
    if parallel and (family is None or family.parity != "block"):
        return "only this runner serves drafts that propose in parallel"
    if speculative and getattr(speculative, "use_heterogeneous_vocab", False):
        return "only this runner serves drafts whose vocabulary differs from the target's"
    return "chosen by vLLM"


def install_reread(runner: Any) -> Rereader:
    """Make the draft process the context again after a swap.

    Raises:
        ValueError: the runner or the layout of the draft's KV cache is unknown.
    """
    version = find_runner(runner)
    if version is None:
        raise ValueError(
            f"only vLLM's V1 and V2 model runners are supported, not {type(runner).__qualname__}"
        )
    rereader = Rereader(runner, *MODULES[version].find_proposer(runner))
    reread_before_steps(rereader)
    return rereader


def install_proposers(runner: Any) -> None:
    """Track which proposer made each draft token, if the runner is known."""
    version = find_runner(runner)
    if version is not None:
        MODULES[version].install_proposers(runner)


def install_capture(runner: Any, capture: Capture) -> None:
    """Make `capture` receive every step of `runner`.

    Raises:
        ValueError: the steps cannot be recorded.
    """
    version = find_runner(runner)
    if version is None:
        raise ValueError(
            f"only vLLM's V1 and V2 model runners can be recorded, not {type(runner).__qualname__}"
        )
    method = getattr(runner.speculative_config, "rejection_sample_method", "standard")
    if method not in LOSSLESS:
        raise ValueError(
            f"rejection_sample_method {method} can emit tokens that the target would not, and "
            f"these would be recorded as the target's tokens: remove it, or use "
            f"{' or '.join(LOSSLESS)}"
        )
    MODULES[version].install_capture(runner, capture)
