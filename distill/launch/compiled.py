"""Compile layers of target and draft with `torch.compile`.

All operations between two matrix products become one kernel.

target       each transformer layer, only in the calls of its signal (`running_compiled`)
draft        each layer, in place: forward and backward
divergence   on a CPU, the operations on a block of logits (`distill.loss.compiled`); a GPU has kernels for them
unchanged    attention over ranges of keys, embeddings, the optimizer
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from redraft.distill.launch.ranks import uses_deepspeed
from redraft.heads.families import standalone
from redraft.heads.nn import blocks, causal_lm
from redraft.heads.nn.attention import StepMemory
from redraft.heads.nn.compilation import compile_here

# Attributes that may contain a draft's layers, as a list or dict.
LAYERS = ("layers", "midlayer", "block", "blocks")

EAGER: Sequence[tuple[Any, str]] = (
    (StepMemory, "attend"),
    (blocks, "attend"),
    (causal_lm, "attend"),
)
"""Functions that are excluded from compiled graphs. Their loops and branches depend on the
documents of a batch, and every draft step adds a pair of keys and values, so each case would need a
separate graph.
"""


def require_compiler() -> None:
    """Raise ValueError if layers cannot be compiled in this launch, or on this machine."""
    if uses_deepspeed():
        raise ValueError(
            "--loop.compile does not work with DeepSpeed: launch with ddp.yaml or fsdp2.yaml, or "
            "remove the flag"
        )
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")
    if not any(name and shutil.which(name) for name in compilers):
        raise ValueError(
            "--loop.compile needs a C++ compiler, but neither g++ nor clang++ was found: install one"
        )
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        raise ValueError("--loop.compile needs Triton on a GPU: pip install triton")


def draft_layers(draft: Any) -> list[nn.Module]:
    """Return the layers of a draft of any family; empty if a draft consists of single matrices."""
    owner = draft.model.base_model if isinstance(draft, standalone.StandaloneDraft) else draft
    found = (getattr(owner, name) for name in LAYERS if hasattr(owner, name))
    return [
        layer
        for one in found
        for layer in (
            one.values()
            if isinstance(one, nn.ModuleDict)
            else one
            if isinstance(one, nn.ModuleList)
            else [one]
        )
    ]


def compile_in_place(layers: Iterable[nn.Module], *, recomputed: bool) -> None:
    """Compile all calls of these layers from now on.

    Parameters and their names stay unchanged.
    """
    _keep_attention_eager()
    # With layer-by-layer graphs, there is nothing to overlap within a graph, so DDP's buckets must
    # not cut it.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        # Use one graph for all shapes, because activations must be recomputed by the graph that
        # computed them.
        layer.compile(dynamic=True if recomputed else None)


@contextmanager
def running_compiled(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Run these layers compiled within this context. Hooks stay outside of the graphs."""
    for layer in layers:
        vars(layer)["forward"] = MethodType(_compiled(type(layer).forward), layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    _keep_attention_eager()
    return compile_here(forward)


def _keep_attention_eager() -> None:
    for owner, name in EAGER:
        # This is safe to repeat: a function that is already wrapped is unwrapped and wrapped again.
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))  # type: ignore[no-untyped-call]
