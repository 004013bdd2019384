"""Compare redraft's drafts in llama.cpp on a CPU with the forecast and with vLLM.

$ python -m benchmarks.llama_cpp                     # trains four drafts, a few minutes each
$ python -m benchmarks.llama_cpp --drafts outputs/bench/llama_cpp --families eagle3 dflash

For each family: how many greedy answers equal the target's, mean acceptance length in llama.cpp and
in the forecast, and tokens/s with and without the draft, in llama.cpp and in vLLM. Everything is in
float32. llama.cpp computes on one thread, and vLLM's worker on one core. The engines take turns in
each round, one request at a time. vLLM does not serve DSpark heads on a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.llama_server import complete, serving
from benchmarks.results import write_results
from benchmarks.studies.presets import make_preset
from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.counters import parse_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.measure import measure
from redraft.engine.prompts import Prompt
from redraft.engine.server import Mode, vllm_server
from redraft.eval.forecast.greedy import Continuation, forecast, greedy_continuations
from redraft.eval.intervals import median_interval
from redraft.files.checkpoint import load_causal_lm
from redraft.files.gguf_writer import write_gguf
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.doctor.pair import Pair
from redraft.heads.engines.exporting import export_draft
from redraft.heads.engines.llama_cpp import FILE, TYPES, read_model
from redraft.heads.engines.table import Export, find_engine
from redraft.heads.target import Target
from redraft.recipes import train
from redraft.recipes.cli.run import run_recipe

FamilyName = Literal["standalone", "eagle3", "dflash", "dspark"]
LAYERS = (2, 4, 6)
"""Layers that the heads read: the presets' layers except the last, which llama.cpp does not serve.
"""

Answers = tuple[list[list[int]], AcceptanceCounts | None, float]
"""Token ids, the engine's counts, and tokens/s."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target: Llama, Qwen 2 or Qwen 3."""
    families: tuple[FamilyName, ...] = ("standalone", "eagle3", "dflash", "dspark")
    """Families to serve."""
    drafts: Path = Path("outputs/bench/llama_cpp")
    """Folder with one training run (containing `draft`) per family. Missing families are trained.
    """
    steps: int | None = None
    """Number of training steps. By default, the presets decide."""
    num_prompts: int = 30
    """Number of prompts."""
    max_tokens: int = 64
    """Maximum length of an answer, in tokens."""
    num_speculative_tokens: int = 3
    """Number of draft tokens per step."""
    rounds: int = 6
    """Number of rounds in which all engines answer the prompts; an interval needs at least 6. With
    1, only counts are compared.
    """
    vllm: bool = True
    """Measure vLLM too."""
    mode: Mode = "compiled"
    """vLLM's mode. `eager` starts faster, but its speed is not representative."""
    output: Path = Path("outputs/bench/llama_cpp.json")
    """File for the results."""


def main(cfg: Config) -> None:
    torch.manual_seed(0)
    drafts = {name: find_draft(cfg, name) for name in cfg.families}
    target = TargetFolder.open(cfg.target)
    model = load_causal_lm(cfg.target, torch.float32)
    _, held_out = split_held_out(load_conversations("stdlib"), 0.2)
    prompts = held_out_prompts(
        held_out, target.tokenizer, num_prompts=cfg.num_prompts, max_length=256
    )
    answers = greedy_continuations(
        model,
        prompts,
        max_tokens=cfg.max_tokens,
        num_speculative_tokens=cfg.num_speculative_tokens,
        end_ids=target.end_ids,
    )
    gguf = write_target(target, cfg.drafts / "target.gguf")
    results = {}
    for name, draft in drafts.items():
        pair = Pair.read(target, draft)
        export = Export(
            pair=pair,
            output=draft.with_name("llama.cpp"),
            num_tokens=cfg.num_speculative_tokens,
            gguf=gguf,
        )
        export_draft(find_engine("llama.cpp"), export, overwrite=True)
        expected = expect(cfg, pair, model, answers)
        results[name] = measure_family(cfg, export, answers, expected)
        print(format_line(name, results[name]), flush=True)
    write_results(cfg.output, {"config": cfg, "families": results})


def find_draft(cfg: Config, name: FamilyName) -> Path:
    """Return the family's draft, and train it first if it is missing."""
    run = cfg.drafts / name
    if not (run / "draft").is_dir():
        preset: Any = make_preset(name)
        changes: dict[str, Any] = {
            "prove": replace(preset.prove, engine=False),
            "output": run,
        }
        if cfg.steps:
            changes["loop"] = replace(preset.loop, steps=cfg.steps)
        if name != "standalone":
            changes["head"] = replace(preset.head, aux_layer_ids=LAYERS)
        train.main(find_family(name), replace(preset, target=str(cfg.target), **changes))
    return run / "draft"


def write_target(target: TargetFolder, path: Path) -> Path:
    """Write the target as a GGUF file in float32.

    The file's tokenizer has the right tokens but splits text differently, so the prompts are token
    ids.
    """
    architecture, keys, tensors = read_model(target.folder)
    tokens = target.tokenizer.convert_ids_to_tokens(list(range(target.text_config.vocab_size)))
    special = set(target.tokenizer.all_special_tokens)
    tokenizer: dict[str, Any] = {
        "model": "gpt2",
        "tokens": [token or f"[PAD{i}]" for i, token in enumerate(tokens)],
        "token_type": [3 if token in special else 1 if token else 5 for token in tokens],
        "merges": ["a b"],
        "eos_token_id": target.end_ids[0],
        "eot_token_id": target.end_ids[-1],
    }
    keys |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, architecture, keys, {n: t.float() for n, t in tensors.items()}, {})
    return path


def expect(
    cfg: Config, pair: Pair, model: Any, answers: Sequence[Continuation]
) -> AcceptanceCounts:
    """Return the counts that the forecast expects of llama.cpp."""
    loaded = pair.family.load(pair.draft, lambda: Target.from_model(model), torch.float32)
    signal = InProcessTarget(model, loaded.aux_layer_ids)
    k, longest = cfg.num_speculative_tokens, cfg.max_tokens
    told = forecast(loaded, signal, answers, k, max_tokens=longest)
    return sum((prompt.counts for prompt in told.per_prompt), AcceptanceCounts.zero(k))


def measure_family(
    cfg: Config, export: Export, answers: Sequence[Continuation], expected: AcceptanceCounts
) -> dict[str, Any]:
    """Measure text, counts and speed of one draft in each engine."""
    prompts = [answer.prompt for answer in answers]
    with ExitStack() as servers:
        engines = start(cfg, export, servers, prompts)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        first: dict[str, Answers] = {}
        for _ in range(cfg.rounds):
            for name, answer in engines.items():
                found = answer()
                rates[name].append(found[2])
                first.setdefault(name, found)
    texts = [answer.output_ids for answer in answers]
    return {
        "tau_forecast": expected.tau,
        "tau": {name: counts.tau for name, (_, counts, _) in first.items() if counts},
        "equal": {
            name: sum(map(list.__eq__, found, texts)) for name, (found, _, _) in first.items()
        },
        "num_prompts": len(texts),
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "speedup": {
            engine: median_interval(
                [a / b for a, b in zip(rates[f"{engine} with draft"], rates[engine], strict=True)]
            )
            for engine in ("llama.cpp", "vLLM")
            if f"{engine} with draft" in rates and cfg.rounds > 5
        },
    }


def start(
    cfg: Config, export: Export, servers: ExitStack, prompts: Sequence[Prompt]
) -> dict[str, Callable[[], Answers]]:
    """Start the servers. Return, for each, a function that answers all prompts."""
    pair, k = export.pair, cfg.num_speculative_tokens
    gguf, name = export.gguf, pair.family.name
    assert gguf is not None
    engines: dict[str, Callable[[], Answers]] = {}
    for label, draft in (("llama.cpp", None), ("llama.cpp with draft", export.output / FILE)):
        client = servers.enter_context(serving(gguf, draft=draft, kind=TYPES[name], tokens=k))

        def ask_llama(client: Any = client, counts: bool = draft is not None) -> Answers:
            before = parse_counts(client.get("/metrics").text)
            begin_s = time.perf_counter()
            found = [complete(client, p.token_ids, cfg.max_tokens)["tokens"] for p in prompts]
            rate = sum(map(len, found)) / (time.perf_counter() - begin_s)
            after = parse_counts(client.get("/metrics").text)
            return found, after.since(before) if counts else None, rate

        engines[label] = ask_llama
    if not cfg.vllm or "v1" not in pair.family.decoders:
        return engines
    drafted = {
        **pair.family.speculative,
        "model": str(pair.draft.absolute()),
        "num_speculative_tokens": k,
    }
    for label, config in (("vLLM", None), ("vLLM with draft", drafted)):
        server = servers.enter_context(
            vllm_server(
                pair.target.folder,
                log=cfg.drafts / name / f"{label.replace(' ', '-')}.log",
                speculative_config=config,
                max_model_len=512,
                dtype="float32",
                mode=cfg.mode,
            )
        )

        def ask_vllm(server: Any = server) -> Answers:
            found = measure(server, prompts, max_tokens=cfg.max_tokens, concurrency=1)
            texts = [output.token_ids for output in found.outputs]
            return texts, found.counts, found.tokens_per_s

        engines[label] = ask_vllm
    return engines


def format_line(name: str, found: dict[str, Any]) -> str:
    tau = ", ".join(f"{engine} {tau:.3f}" for engine, tau in found["tau"].items())
    equal = ", ".join(f"{engine} {count}" for engine, count in found["equal"].items())
    rates = ", ".join(f"{engine} {rate:.0f}" for engine, rate in found["tokens_per_s"].items())
    return (
        f"{name}: tau {found['tau_forecast']:.3f} forecast, {tau}; the target's text in {equal} of "
        f"{found['num_prompts']}; tokens/s {rates}"
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
