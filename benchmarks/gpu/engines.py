"""Measure redraft's plugin in vLLM on the card.

It checks the model runner, the target's text, the records against Transformers, and swaps under
CUDA graphs.

R = recorded rows, K = kept ids, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results
from redraft.engine.settings import write_settings
from redraft.files.checkpoint import load_causal_lm
from redraft.online.learning.replay import training_sequence
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin
from redraft.online.records.record import CorruptRecordError, read_frames
from redraft.recipes.serve.serve import with_plugin

ASSETS = Path(__file__).parents[2] / "tests/assets"

TARGET, HEAD = ASSETS / "tiny-target", ASSETS / "tiny-eagle3"

LIMIT_S = 110.0
"""Time limit for one engine, in seconds."""

NUM_TOKENS = 3


def measure(cfg: Config, results: Results) -> None:
    """Measure every draft in its own engine, with and without capture.

    Raises:
        ValueError: a draft failed.
    """
    failed = []
    for draft in cfg.drafts:
        for kind in ("recorded", "plain"):
            name = f"{draft}, {kind}"
            file, spool = cfg.output / f"engine-{draft}-{kind}.json", cfg.output / f"spool-{draft}"
            shutil.rmtree(spool, ignore_errors=True)
            # A server with a registry pins the memory for staged drafts when it starts.
            settings: dict[str, Any] = {"registry": str(cfg.output)}
            if kind == "recorded":
                settings["capture"] = {"spool": str(spool), "hidden_states": True}
            env = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_PLUGINS": with_plugin(os.environ.get("VLLM_PLUGINS")),
            }
            env |= write_settings(settings)
            command = [sys.executable, "-m", "benchmarks.gpu.engines", draft, str(file), str(spool)]
            file.unlink(missing_ok=True)
            try:
                code: object = subprocess.run(command, env=env, timeout=LIMIT_S).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {LIMIT_S:.0f} s"
            results.keep(
                name,
                {"exit status": code, **(json.loads(file.read_text()) if file.exists() else {})},
            )
            failed += [name] if code else []
    if failed:
        raise ValueError(f"{'; '.join(failed)} failed")


def serve(draft: str, results: Results, spool: Path) -> None:
    """Start an engine with this draft in this process, and measure it."""
    from vllm import LLM

    good = TARGET if draft == "draft_model" else HEAD
    began_s, on_gpu = time.perf_counter(), torch.cuda.is_available()
    llm = LLM(
        model=str(TARGET),
        dtype="bfloat16" if on_gpu else "float32",
        max_model_len=512,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        kv_cache_memory_bytes=(2 << 30) if on_gpu else (64 << 20),
        enforce_eager=not on_gpu,
        speculative_config={
            "model": str(good),
            "method": draft,
            "num_speculative_tokens": NUM_TOKENS,
        },
    )
    engine = Engine(llm)
    results.keep("start", {"seconds": time.perf_counter() - began_s, **engine.status()})
    prompts = make_prompts(12)
    texts = engine.answer(prompts, 48)
    results.keep("accepted", engine.read_accepted())
    for name, folder in (("noise", make_noise(good, results.path.with_suffix(""))), ("back", good)):
        loaded = engine.swap(folder)
        again = engine.answer(prompts, 48)
        equal = sum(one == other for one, other in zip(again, texts, strict=True))
        results.keep(
            f"swap, {name}",
            {**loaded, "accepted": engine.read_accepted(), "texts as before": equal},
        )
    engine.answer(prompts, 16)
    began_s = time.perf_counter()
    engine.answer([prompts[i % len(prompts)] for i in range(192)], 96)
    results.keep("tokens/s", 192 * 96 / (time.perf_counter() - began_s))
    results.keep("end", engine.status())
    model = load_causal_lm(TARGET, torch.float32).to("cuda" if on_gpu else "cpu")
    results.measure(
        "distance of the text from the best token, nats",
        lambda: find_distance(model, prompts, texts),
    )
    if spool.is_dir():
        results.measure("records", lambda: compare_records(model, spool))


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._seen = llm, (0.0, 0.0)

    def status(self) -> dict[str, Any]:
        (status,) = self._llm.collective_rpc("redraft_status")
        return dict(status)

    def answer(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return greedy answers of `length` tokens; the plugin records them."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
        )
        sampling.extra_args = {EXTRA_ARGS_KEY: Origin()._asdict()}
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [
            list(one.outputs[0].token_ids)
            for one in self._llm.generate(asked, sampling, use_tqdm=False)
        ]

    def read_accepted(self) -> float:
        """Return the number of accepted tokens per step since the last call."""
        found = {
            metric.name: metric.value
            for metric in self._llm.get_metrics()
            if hasattr(metric, "value")
        }
        names = ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts")
        accepted, drafts = (found.get(name, 0.0) for name in names)
        before, self._seen = self._seen, (accepted, drafts)
        return float((accepted - before[0]) / max(1, drafts - before[1]))

    def swap(self, folder: Path) -> dict[str, Any]:
        """Stage a draft, load it and commit it. Raises: ValueError if it is refused."""
        (staged,) = self._llm.collective_rpc("redraft_stage", args=(str(folder), "check"))
        if not staged["ok"]:
            raise ValueError(staged["error"])
        while not self._llm.collective_rpc("redraft_staged")[0]["done"]:
            time.sleep(0.01)
        (loaded,) = self._llm.collective_rpc("redraft_load", args=(str(folder),))
        self._llm.collective_rpc("redraft_commit", args=(folder.name,))
        self._llm.collective_rpc("redraft_discard", args=("check",))
        return dict(loaded)


def make_prompts(count: int) -> list[list[int]]:
    """Return prompts of random tokens; each is 7 tokens longer than the previous one."""
    chosen = random.Random(0)
    return [[chosen.randrange(8, 4096) for _ in range(10 + 7 * i)] for i in range(count)]


def make_noise(good: Path, folder: Path) -> Path:
    """Write a copy of the draft whose matrices are random noise."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    torch.manual_seed(0)
    weights = {
        name: torch.randn_like(x) * x.float().std().to(x.dtype)
        if x.is_floating_point() and x.ndim == 2
        else x
        for name, x in load_file(good / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def read_log_probs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return log p of every next token, [T, V], on the CPU."""
    found: torch.Tensor = (
        model(torch.tensor([list(ids)], device=model.device)).logits[0].log_softmax(-1).cpu()
    )
    return found


def find_distance(
    model: Any, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> list[float]:
    """Return, for each answer, the largest gap in log p between a token and the best token there.

    Rounding in bfloat16 alone causes gaps of 0.1.
    """
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        log_probs_TV = read_log_probs(model, [*prompt, *text])[len(prompt) - 1 : -1]
        taken_T = log_probs_TV.gather(1, torch.tensor(text)[:, None])[:, 0]
        found.append(float((log_probs_TV.max(-1).values - taken_T).max()))
    return found


def compare_records(model: Any, spool: Path) -> dict[str, Any]:
    """Return the errors of the recorded log p of the four most probable tokens."""
    time.sleep(2.5)  # a file of the spool is closed after two seconds
    errors, num_rows = [], 0
    for file in sorted(spool.glob("*.records"))[:6]:
        for _, record in read_frames(file.read_bytes()):
            if num_rows > 3000 or isinstance(record, CorruptRecordError):
                continue
            sequence = training_sequence(record)
            log_probs_TV = read_log_probs(model, [int(one) for one in sequence.input_ids_T])
            ids_RK = torch.as_tensor(sequence.topk_ids_RK).long()
            wanted_RK = log_probs_TV[torch.as_tensor(sequence.rows_R).long()].gather(1, ids_RK)
            errors.append(
                (wanted_RK - torch.as_tensor(sequence.topk_log_probs_RK)).abs()[:, :4].flatten()
            )
            num_rows += len(ids_RK)
    if not errors:
        raise ValueError(f"there are no records in {spool}")
    quantiles = torch.cat(errors).quantile(torch.tensor([0.5, 0.99, 1.0])).tolist()
    return {"rows": num_rows, "error of log p: median, 99%, worst": quantiles}


MEASURES = {"engine": measure}

if __name__ == "__main__":
    serve(sys.argv[1], Results(Path(sys.argv[2])), Path(sys.argv[3]))
