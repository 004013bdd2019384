"""Every name of vLLM that redraft wraps, in one ordered table, and the one way to wrap it.

    TABLE ─► install(feature): classes and functions of a process   ─┐
             hook(object, feature, ...): methods of one object       ├─► Chain, one per name ─► vLLM
    METHODS ─► install(feature): methods that vLLM finds by name     ─┘

A wrapper is made by a function that takes the next call and returns its own. If several features wrap
one name, the order of the table decides who is called first, and neither the time nor the order of
the installation. A chain is built when a feature joins: a call costs the functions in it.

The rows name functions by strings, so a process imports only the features that it installs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Wrap = Callable[[Any], Any]
"""Takes the next call of a chain and returns the one before it. May be called again."""

SUPPORTED = ">=0.32,<0.34"
"""vLLM versions of the package's `cuda` extra."""

V1_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
WORKER = "v1.worker.gpu_worker:Worker"
WORKER_BASE = "v1.worker.worker_base:WorkerBase"
WORKER_WRAPPER = "v1.worker.worker_base:WorkerWrapperBase"
SCHEDULER = "v1.core.sched.scheduler:Scheduler"
ENGINE_CORE = "v1.engine.core:EngineCore"
ENGINE = "v1.engine.async_llm:AsyncLLM"
SPECULATORS = "v1.worker.gpu.spec_decode"
ANY_MODEL = "model_executor.models.llama:LlamaForCausalLM"
"""Stands for the class of whichever model is served."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What asks for wrappers in a whole process."""

    name: str
    asked: str = ""
    """Function that returns whether this process needs it. Empty: each process does."""
    is_measured: bool = False
    """Whether engines started for measurements and hidden states have it, without the plugin."""


FEATURES = (
    Feature(name="cpu_sampling", asked="eval.engine.wait:is_cpu", is_measured=True),
    Feature(name="engine_wait", asked="eval.engine.wait:is_cpu", is_measured=True),
    Feature(name="gemm_release", asked="eval.engine.wait:is_cpu", is_measured=True),
    Feature(name="grouped_norm", asked="eval.engine.wait:is_cpu", is_measured=True),
    Feature(name="lookups", is_measured=True),
    Feature(name="ending", asked="eval.engine.wait:has_launcher", is_measured=True),
    Feature(name="labels"),
    Feature(name="pace", asked="online.engine.pace:is_paced"),
    Feature(name="seeds", asked="online.engine.seeds:drafts_vary"),
    Feature(name="domains"),
    Feature(name="worker"),
)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A name of vLLM, and one feature that wraps it."""

    names: tuple[str, ...]
    """`module:Class.method` or `module:function` below vllm: one attribute, of these classes."""
    feature: str
    by: str
    """`module:function` below redraft. In the chain of a class it makes the wrapper."""
    why: str
    """The symptom without it."""
    runner: Literal["V1", "V2", "both"] = "both"
    versions: str = SUPPORTED

    @property
    def attribute(self) -> str:
        return self.names[0].rpartition(":")[2].rpartition(".")[2]


TABLE = (
    # --- classes and functions of the CPU build
    Hook(
        names=("utils.cpu_triton_utils:_expand_kernel_impl",),
        feature="cpu_sampling",
        by="eval.engine.cpu_patches:replace_expand_kernel",
        why="temperature, top-p and top-k of draft tokens are uninitialised memory",
        runner="V1",
    ),
    Hook(
        names=("v1.sample.ops.topk_topp_sampler:apply_top_k_only",),
        feature="cpu_sampling",
        by="eval.engine.cpu_patches:skip_no_rows",
        why="top-k without top-p ends the engine in a step that verifies nothing",
        runner="V1",
    ),
    Hook(
        names=("v1.engine.core:EngineCoreProc.run_busy_loop",),
        feature="engine_wait",
        by="eval.engine.wait:run_with_sleeps",
        why="requests wait until the engine is out of work, at a third of the speed",
    ),
    Hook(
        names=("distributed.device_communicators.shm_broadcast:sched_yield",),
        feature="yields",
        by="eval.engine.wait:with_sleeps",
        why="as above; wrapped within the engine core's loop, because workers wait as before",
    ),
    Hook(
        names=("_custom_ops:CPUDNNLGEMMHandler.__del__",),
        feature="gemm_release",
        by="eval.engine.cpu_patches:release_outside_traces",
        why="a handle collected while torch traces an EAGLE draft overflows the stack",
    ),
    Hook(
        names=("_custom_ops:rms_norm",),
        feature="grouped_norm",
        by="eval.engine.cpu_patches:with_groups",
        why="layers after the first of a DFlash draft read wrong keys",
    ),
    # --- classes of every build
    Hook(
        names=("entrypoints.launchers.launcher:NoSignalServer.shutdown",),
        feature="ending",
        by="eval.engine.wait:shutdown_in_time",
        why="a server never ends after SIGTERM while a client sends half a request",
    ),
    Hook(
        names=(f"{SCHEDULER}.__init__",),
        feature="pace",
        by="online.engine.pace:pace_scheduler",
        why="vLLM drafts by a constant table of batch sizes (vllm-project/vllm#49548)",
    ),
    Hook(
        names=(f"{SCHEDULER}.schedule",),
        feature="seeds",
        by="online.engine.seeds:without_seeded_drafts",
        why="a sampled request with a seed has another answer beside other requests",
    ),
    Hook(
        names=(f"{SCHEDULER}.schedule",),
        feature="pace",
        by="online.engine.pace:begin_steps",
        why="a step's beginning is not measured",
    ),
    Hook(
        names=(f"{SCHEDULER}.update_from_output",),
        feature="domains",
        by="online.engine.domains:note_foreign",
        why="drafts of lookups and padding count as the served version's",
    ),
    Hook(
        names=(f"{SCHEDULER}.update_from_output",),
        feature="pace",
        by="online.engine.pace:end_steps",
        why="a step's end and its accepted tokens are not measured",
    ),
    Hook(
        names=(f"{SCHEDULER}.make_spec_decoding_stats",),
        feature="domains",
        by="online.engine.domains:count_drafts",
        why="vLLM's counters name no domain, and are off with --disable-log-stats",
    ),
    Hook(
        # The pace sees the calls of whole loads; ranks are compared within them.
        names=(f"{ENGINE_CORE}.collective_rpc",),
        feature="pace",
        by="online.engine.pace:note_swaps",
        why="the policy judges a new draft by the old one's acceptance",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.collective_rpc",),
        feature="labels",
        by="online.engine.target_watch:compare_ranks",
        why="a load that fails on one rank leaves the answers of others to the next call",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.set_weight_version",),
        feature="labels",
        by="online.engine.target_watch:pass_labels",
        why="workers record without the name that a trainer gives its weights",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.post_step",),
        feature="pace",
        by="online.engine.pace:take_drafts",
        why="workers are asked for the drafts of a step without any",
    ),
    Hook(
        # Called last of the three first: a runner has its lookup, then the pace, then the worker.
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="worker",
        by="online.engine.worker:install_worker",
        why="a worker records and swaps nothing",
    ),
    Hook(
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="pace",
        by="online.engine.pace:install_runner",
        why="a draft runs in steps of 0 draft tokens",
    ),
    Hook(
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="lookups",
        by="eval.engine.lookups:install_lookups",
        why="vLLM has no method for counted answers, nor for a lookup before a head",
        runner="V1",
    ),
    Hook(
        names=("v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",),
        feature="pace",
        by="online.engine.runner_v2:complete_graphs",
        why="a step finds no CUDA graph if the next token count lacks its query length",
        runner="V2",
    ),
    Hook(
        names=(f"{SPECULATORS}.dflash.cudagraph:DFlashCudaGraphManager._init_candidates",),
        feature="pace",
        by="online.engine.runner_v2:without_table",
        why="a block draft gets CUDA graphs of parts of a block, which it never runs",
        runner="V2",
    ),
)
"""Rows of one name are in the order of the calls: the first is called first."""

METHODS = {
    f"{ENGINE_CORE}.redraft_pace": ("pace", "online.engine.pace:answer_pace"),
    f"{ENGINE_CORE}.redraft_domains": ("domains", "online.engine.domains:answer_domains"),
    **{
        f"{WORKER_BASE}.redraft_{name}": ("worker", f"online.engine.worker:redraft_{name}")
        for name in (
            *("status", "forget", "move"),
            *("stage", "staged", "discard", "load", "restore", "commit"),
        )
    },
    **{
        f"{WORKER_BASE}.redraft_{name}": ("worker", f"online.engine.target_watch:{name}")
        for name in ("name_target", "load_target", "update_rank", "doubt_target")
    },
}
"""Methods added to vLLM's classes, which finds those of utility calls by name: feature, function."""


class Chain:
    """One name of vLLM: the original call, and those around it."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.original = getattr(owner, attribute)
        self._wraps: dict[int, Wrap] = {}

    def put(self, place: int, wrap: Wrap) -> None:
        """Wrap the name, in the order of the places in TABLE. A second wrap replaces the first."""
        self._wraps[place] = wrap
        call = self.original
        for each in sorted(self._wraps, reverse=True):
            call = self._wraps[each](call)
        setattr(self.owner, self.attribute, call)


_chains: dict[str, Chain] = {}
_installed: set[str] = set()


def is_installed(feature: str) -> bool:
    """Whether this process has a feature's wrappers. vLLM loads its plugins in all processes."""
    return feature in _installed


def install(feature: str) -> None:
    """Wrap the names of a feature in this process, and add its methods. Safe to call again.

    Raises:
        ImportError, AttributeError: this vLLM lacks a name. All names are as before.
    """
    if feature in _installed:
        return
    rows = [(place, hook) for place, hook in enumerate(TABLE) if hook.feature == feature]
    chains = {
        name: _chains.get(name) or Chain(*_find(f"vllm.{name}"))
        for _, hook in rows
        for name in hook.names
    }
    wraps = [(hook, place, _load(hook.by)) for place, hook in rows]
    methods = [
        (*_find(f"vllm.{name}"), _load(by))
        for name, (owner, by) in METHODS.items()
        if owner == feature
    ]
    _chains.update(chains)
    for hook, place, wrap in wraps:
        for name in hook.names:
            chains[name].put(place, wrap)
    for cls, name, method in methods:
        setattr(cls, name, method)
    _installed.add(feature)


def install_if_asked(feature: Feature) -> None:
    """Install a feature if this process needs it.

    Raises:
        ValueError: its setting is bad.
        ImportError, AttributeError: as `install`.
    """
    if not feature.asked or _load(feature.asked)():
        install(feature.name)


def _load(name: str) -> Any:
    return getattr(*_find(f"redraft.{name}"))


def _find(name: str) -> tuple[Any, str]:
    """The object before the last dot of `module:Class.method`, and the name after it."""
    module, _, path = name.partition(":")
    owner, (*classes, last) = importlib.import_module(module), path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, last
