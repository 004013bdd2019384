"""Record the drafter's inputs, outputs and proposals in a real vLLM.

vLLM runs in this process.

    python -m redraft.engine.parity.dump runs.json

The file contains a list of `engine.parity.run.EngineRun`. The results are saved next to it with
torch, as dump-0.pt, dump-1.pt and so on: `outputs` (token ids by prompt) and `blocks`, one per
drafted block. A block has `request`, `num_output` (tokens emitted before it), `drafted` (token ids)
and, for the first blocks of a prompt, `passes` (the drafter's forward passes, with inputs by name
and outputs as a list) and `confidence` (the estimates of acceptance, if there are any). Requests
run one after another, so that the request and the rows of every pass are known.
"""

import functools
import gc
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run vLLM in this process, to reach the drafter, and with vLLM's own choice of model runner, as in
# a server.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import msgspec
import torch

from redraft.engine.hooks import around, hook, install
from redraft.engine.parity.run import EngineRun


class Recorder:
    """Wraps the calls between an engine's model runner and its drafter.

    It stores copies of their inputs and outputs.
    """

    def __init__(self, runner: Any, prompts: int, blocks_a_prompt: int) -> None:
        self._runner, self._prompts, self._blocks_a_prompt = runner, prompts, blocks_a_prompt
        self._passes: list[dict[str, Any]] | None = None
        self._num_output: dict[str, int] = {}
        self._order: list[str] = []
        self.blocks: list[dict[str, Any]] = []
        self._propose: Any
        self._forward: Any
        # V2 has a speculator, and V1 has a drafter.
        if hasattr(runner, "speculator"):
            self._model = runner.speculator.model
            propose = around(self, "_propose", self.propose_v2)
            hook(runner.speculator, "parity", propose=propose)
        else:
            self._model = runner.drafter.model
            propose = around(self, "_propose", self.propose_v1)
            hook(runner, "parity", propose_draft_token_ids=propose)
        # `nn.Module.__call__` looks `forward` up on the instance, so every call of the model passes
        # through here.
        hook(self._model, "parity", forward=around(self, "_forward", self.forward))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._passes is None:
            return self._forward(*args, **kwargs)
        # Copy before the call, because the engine reuses these buffers for the next pass.
        given = {"args": copied(args), **{name: copied(value) for name, value in kwargs.items()}}
        out = self._forward(*args, **kwargs)
        self._passes.append(
            {**given, "out": copied(out if isinstance(out, list | tuple) else [out])}
        )
        return out

    def propose_v1(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Rejected positions of the block contain -1.
        emitted = sum(int(token) >= 0 for token in sampled_token_ids[0])
        propose = functools.partial(
            self._propose, scheduler_output, sampled_token_ids, *args, **kwargs
        )
        return self.record(self._runner.input_batch.req_ids[0], emitted, propose)

    def propose_v2(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        # Find it by name, because vLLM may pass it in any position.
        num_sampled = (
            inspect.signature(self._propose)
            .bind(input_batch, *args, **kwargs)
            .arguments["num_sampled"]
        )
        propose = functools.partial(self._propose, input_batch, *args, **kwargs)
        return self.record(input_batch.req_ids[0], int(num_sampled[0]), propose)

    def record(self, request: str, emitted: int, propose: Callable[[], Any]) -> Any:
        """Record the draft that `propose` returns after a request has emitted `emitted` tokens."""
        if request not in self._num_output:
            self._order.append(request)
        index = self._order.index(request)
        self._num_output[request] = self._num_output.get(request, 0) + emitted
        before = sum(block["request"] == index for block in self.blocks)
        self._passes = [] if index < self._prompts and before < self._blocks_a_prompt else None
        drafted = propose()
        tokens = [int(token) for token in drafted[0]]
        self.blocks.append(
            {
                "request": index,
                "num_output": self._num_output[request],
                "drafted": tokens,
                "passes": self._passes or [],
                "confidence": self.estimate_confidence(self._passes[-1], tokens)
                if self._passes
                else [],
            }
        )
        self._passes = None
        return drafted

    def estimate_confidence(self, given: dict[str, Any], drafted: list[int]) -> list[float]:
        """Return the drafter's estimated acceptance of each draft token; empty if it has none.

        vLLM computes estimates only in adaptive verification, so this method calls its modules
        directly.
        """
        if getattr(getattr(self._model, "model", None), "confidence_head", None) is None:
            return []
        # The Markov head reads the token before each drafted token: the anchor, then all drafted
        # tokens but the last.
        before = torch.tensor([int(given["input_ids"][0]), *drafted[:-1]])
        hidden, device = given["out"][0][-len(drafted) :], next(self._model.parameters()).device
        estimated = self._model.compute_confidence(
            hidden.to(device), self._model.markov_embed(before.to(device))
        )
        return [float(each) for each in estimated]


def copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [copied(v) for v in value]
    return value.detach().cpu().clone() if torch.is_tensor(value) else None


def dump(run: EngineRun) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    max_model_len = max(map(len, run.prompts)) + run.max_tokens + run.num_speculative_tokens
    llm = LLM(
        model=run.target,
        speculative_config=run.speculative_config,
        dtype=run.dtype,
        max_model_len=max_model_len,
        max_num_seqs=1,  # every row of a pass belongs to one request
        # Large enough that every prompt is prefilled in one step.
        max_num_batched_tokens=max(2048, max_model_len),
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=run.kv_cache_bytes,
        **run.engine,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    recorder = Recorder(runner, run.recorded_prompts, run.blocks_a_prompt)
    ends = list(run.end_ids)  # without a tokenizer, the engine does not have the end-of-text token
    sampling = SamplingParams(
        temperature=0,
        max_tokens=run.max_tokens,
        ignore_eos=True,
        stop_token_ids=ends,
        detokenize=False,
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in run.prompts], sampling, use_tqdm=False
    )
    return {"outputs": [list(o.outputs[0].token_ids) for o in outputs], "blocks": recorder.blocks}


def rotate_in_pytorch(_: Any) -> Any:
    """Compute rotary embeddings in PyTorch instead of in the CPU kernel."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return RotaryEmbedding.forward_native


def keep_imports_frozen() -> None:
    """Exempt all objects loaded so far from garbage collection.

    Importing vLLM creates a million of them, and collecting them takes three of the four seconds
    that an engine needs on a CPU.
    """
    gc.collect()
    gc.freeze()
    # vLLM freezes its heap when an engine starts and unfreezes everything when it stops, including
    # these objects.
    gc.freeze = gc.unfreeze = lambda: None


def main(spec: Path) -> None:
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    keep_imports_frozen()
    if current_platform.is_cpu():
        install("grouped_norm")
    for number, run in enumerate(msgspec.json.decode(spec.read_bytes(), type=list[EngineRun])):
        if run.native_rotary:
            install("native_rotary")
        torch.save(dump(run), spec.with_name(f"dump-{number}.pt"))
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
