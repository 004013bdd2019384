"""vLLM 0.32: the engine that redraft's tests run.

Its rules are in `heads.doctor.checks`. An export converts nothing, and always has the same layout.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines import folders
from redraft.heads.engines.folders import export_cure, shell
from redraft.heads.engines.table import Export


def find_refused(pair: Pair) -> Iterator[Finding]:
    """Report nothing, because vLLM has a method for each family."""
    yield from ()


def find_misread(pair: Pair) -> Iterator[Finding]:
    """Report a norm with the name that it has in SGLang's and TensorRT-LLM's folders."""
    if any(name.startswith("layers.1.hidden_norm") for name in pair.shapes):
        yield Finding(
            "vLLM expects the first norm of layers.1 under the name input_layernorm, and "
            "fails to start with hidden_norm",
            export_cure("vllm"),
        )


def write(export: Export, folder: Path) -> None:
    """Write the draft in the layout "vllm"."""
    folders.write(export.pair, folder, lambda config, tensors: None)


def serve(export: Export) -> str:
    """Return the shell command that serves the target with the draft.

    `redraft serve` accepts the same folder.
    """
    pair = export.pair
    model = {} if pair.is_own_target else {"model": str(export.output)}
    spoken = {**pair.family.speculative, **model, "num_speculative_tokens": export.num_tokens}
    return shell("vllm", "serve", pair.target.name, "--speculative-config", json.dumps(spoken))
