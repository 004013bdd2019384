"""vLLM's adaptive verification in Triton's interpreter: its own manager, without CUDA graphs.

    python adaptive_on_cpu.py trim '{...}'     # the second argument is that of run_capture.py

`off`: without it; `all`: rows cost nothing, so every draft token is verified; `none`: they cost
everything; `trim`: something between. Prints, after run_capture's report, what the manager decided:
the budget and the scheduled draft tokens of each step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

STEP_MS = 10.0
ROW_MS = {"all": 0.0, "trim": 1.5, "none": 1e6}
decided: list[tuple[int, int]] = []


def stub(mode: str) -> None:
    """Let this process verify adaptively, past vLLM's checks for graphs and attention backends."""
    import numpy as np
    import vllm.v1.worker.gpu.model_runner as model_runner
    import vllm.v1.worker.gpu.spec_decode.adaptive_verification as adaptive
    from vllm.config import VllmConfig

    VllmConfig._validate_adaptive_verification = lambda config: None

    def make(**options: Any) -> Any:
        if not options["enable_adaptive_verification"]:
            return None
        names = ("req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits")
        made = adaptive.AdaptiveVerificationManager(*(options[name] for name in names))
        made.set_cost_curves([(1, 0.0), (64, 0.0)], [(1, STEP_MS), (513, STEP_MS)])
        drafting, verifying = made.cost_tables
        made.cost_tables = (drafting, STEP_MS + ROW_MS[mode] * np.arange(len(verifying)))
        count = made.get_num_tokens

        def counted(num_tokens: Any, drafts: Any) -> int:
            found: int = count(num_tokens, drafts)
            decided.append((made._batch_budget[2], sum(map(len, drafts.values()))))
            return found

        made.get_num_tokens = counted
        return made

    adaptive._assign_draft_token_budget_compiled = adaptive._assign_draft_token_budget
    model_runner.maybe_create_adaptive_verification_manager = make
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **_: mode


def force() -> None:
    """Verify adaptively although the configuration does not ask for it."""
    import vllm.v1.worker.gpu.model_runner as model_runner

    init = model_runner.init_speculator

    def init_adaptive(vllm_config: Any, *args: Any) -> Any:
        vllm_config.speculative_config.enable_adaptive_verification = True
        return init(vllm_config, *args)

    model_runner.init_speculator = init_adaptive


if __name__ == "__main__":
    import run_capture

    if sys.argv[1] != "off":
        stub(sys.argv[1])
        force()
    run_capture.main(json.loads(sys.argv[2]))
    print("DECIDED", json.dumps(decided))
