"""An ordered table of every vLLM name that redraft wraps, and the functions that wrap them.

    TABLE ─► install(feature): classes and functions of a process   ─┐
             hook(object, feature, ...): methods of one object       ├─► Chain, one per name ─► vLLM
    METHODS ─► install(feature): methods that vLLM finds by name     ─┘

A wrapper is made by a function that receives the next call and returns its replacement. If several
features wrap one name, the order of the table decides which is called first; the time and order of
installation do not matter. A chain is rebuilt whenever a feature joins, so a call costs only the
functions in its chain.

The rows name functions as strings, so that a process imports only the features that it installs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.version import Version

Wrap = Callable[[Any], Any]
"""Receives the next call in a chain, and returns the call that replaces it. It may be called
repeatedly.
"""

SUPPORTED = ">=0.32,<0.34"
"""vLLM versions that the package's `cuda` extra allows."""


def find_unsupported(version: str | None) -> str:
    """Return the error for an untested vLLM release; empty for a supported release.

    Only releases whose names were compared with the table are supported. A `version` of None, i.e.
    an engine without metadata, passes.
    """
    # A nightly build of a release counts as that release.
    if version is None or SpecifierSet(SUPPORTED).contains(
        Version(version).base_version, prereleases=True
    ):
        return ""
    return (
        f"vLLM {version} is installed, but this redraft supports {SUPPORTED}: install a supported "
        "version, or a newer redraft"
    )


V1_RUNNER = "v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "v1.worker.gpu.model_runner:GPUModelRunner"
WORKER = "v1.worker.gpu_worker:Worker"
WORKER_BASE = "v1.worker.worker_base:WorkerBase"
WORKER_WRAPPER = "v1.worker.worker_base:WorkerWrapperBase"
SCHEDULER = "v1.core.sched.scheduler:Scheduler"
ENGINE_CORE = "v1.engine.core:EngineCore"
ENGINE = "v1.engine.async_llm:AsyncLLM"
CHAT = "entrypoints.openai.chat_completion.serving:OpenAIServingChat"
SPECULATORS = "v1.worker.gpu.spec_decode"
ANY_MODEL = "model_executor.models.llama:LlamaForCausalLM"
"""Stands for the class of the served model."""

PROPOSE = tuple(
    f"{SPECULATORS}.{name}.propose"
    for name in (
        "standalone_ar.speculator:StandaloneARSpeculator",
        "target_dependent_ar.speculator:TargetDependentARSpeculator",
        "dflash.speculator:DFlashSpeculator",
        "ngram.speculator:NgramGPUSpeculator",
    )
)
"""The methods that the V2 runner calls to request tokens from its drafters."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A reason to wrap names throughout a process."""

    name: str
    asked: str = ""
    """Function, as "module:function", that returns whether this process needs the feature. If
    empty, every process does.
    """
    is_measured: bool = False
    """Whether engines that run without the plugin, for measurements or hidden states, also have the
    feature.
    """


FEATURES = (
    Feature(name="cpu_sampling", asked="engine.wait:is_cpu", is_measured=True),
    Feature(name="engine_wait", asked="engine.wait:is_cpu", is_measured=True),
    Feature(name="gemm_release", asked="engine.wait:is_cpu", is_measured=True),
    Feature(name="grouped_norm", asked="engine.wait:is_cpu", is_measured=True),
    Feature(name="lookups", is_measured=True),
    Feature(name="late_drafts", asked="engine.wait:is_cpu", is_measured=True),
    Feature(name="ending", asked="engine.wait:has_launcher", is_measured=True),
    Feature(name="labels"),
    Feature(name="pace", asked="online.engine.pace:is_paced"),
    Feature(name="seeds", asked="online.engine.class_hooks:drafts_vary"),
    Feature(name="domains"),
    Feature(name="worker"),
)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A name in vLLM, and one feature that wraps it."""

    names: tuple[str, ...]
    """`module:Class.method` or `module:function` within vllm. If there are several, each has the
    same attribute name.
    """
    feature: str
    by: str
    """`module:function` within redraft. For classes, the function makes the wrapper. For an object,
    it is the wrapper or installs it.
    """
    why: str
    """Symptom without the wrapper."""
    of_object: bool = False
    """Whether `hook` wraps the method of one object, while `install` leaves the class unchanged."""
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
        by="engine.patches:replace_expand_kernel",
        why="temperature, top-p and top-k of draft tokens are uninitialised memory",
        runner="V1",
    ),
    Hook(
        names=("v1.sample.ops.topk_topp_sampler:apply_top_k_only",),
        feature="cpu_sampling",
        by="engine.patches:skip_no_rows",
        why="top-k without top-p crashes the engine in a step that verifies nothing",
        runner="V1",
    ),
    Hook(
        names=("distributed.device_communicators.shm_broadcast:sched_yield",),
        feature="engine_wait",
        by="engine.patches:with_sleeps",
        why="a step begins one kernel tick late if another thread is runnable",
    ),
    Hook(
        names=("_custom_ops:CPUDNNLGEMMHandler.__del__",),
        feature="gemm_release",
        by="engine.patches:release_outside_traces",
        why="a handle collected while torch traces an EAGLE draft overflows the stack",
    ),
    Hook(
        names=("_custom_ops:rms_norm",),
        feature="grouped_norm",
        by="engine.patches:with_groups",
        why="all layers of a DFlash draft except the first read wrong keys",
    ),
    # --- classes of every build
    Hook(
        names=("entrypoints.launchers.launcher:NoSignalServer.shutdown",),
        feature="ending",
        by="engine.patches:shutdown_in_time",
        why="a server never stops after SIGTERM if a client has sent half a request",
    ),
    Hook(
        names=(f"{SCHEDULER}.__init__",),
        feature="pace",
        by="online.engine.class_hooks:pace_scheduler",
        why="vLLM drafts from a constant table of batch sizes (vllm-project/vllm#49548)",
    ),
    Hook(
        names=(f"{SCHEDULER}.schedule",),
        feature="seeds",
        by="online.engine.class_hooks:without_seeded_drafts",
        why="a seeded request's answer depends on the requests that run with it",
    ),
    Hook(
        names=(f"{SCHEDULER}.schedule",),
        feature="pace",
        by="online.engine.class_hooks:begin_steps",
        why="the start of a step is not measured",
    ),
    Hook(
        names=(f"{SCHEDULER}.update_from_output",),
        feature="domains",
        by="online.engine.class_hooks:note_foreign",
        why="drafts from lookups and padding count as drafts of the served version",
    ),
    Hook(
        names=(f"{SCHEDULER}.update_from_output",),
        feature="pace",
        by="online.engine.class_hooks:end_steps",
        why="the end of a step and its accepted tokens are not measured",
    ),
    Hook(
        names=(f"{SCHEDULER}.make_spec_decoding_stats",),
        feature="domains",
        by="online.engine.class_hooks:count_drafts",
        why="vLLM's counters have no domain, and are off with --disable-log-stats",
    ),
    Hook(
        # The pace is outermost, so it handles whole loads; ranks are compared within a load.
        names=(f"{ENGINE_CORE}.collective_rpc",),
        feature="pace",
        by="online.engine.class_hooks:note_swaps",
        why="the policy uses the old draft's acceptance for a new draft",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.collective_rpc",),
        feature="labels",
        by="online.engine.class_hooks:compare_ranks",
        why="if a load fails on one rank, the next call receives the other ranks' answers",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.set_weight_version",),
        feature="labels",
        by="online.engine.class_hooks:pass_labels",
        why="records lack the version name that a trainer gives to its weights",
    ),
    Hook(
        names=(f"{ENGINE_CORE}.post_step",),
        feature="pace",
        by="online.engine.class_hooks:take_drafts",
        why="workers are asked for the drafts of a step that has none",
    ),
    Hook(
        # The calls are nested: the lookup is installed first, then the pace, then the worker.
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="worker",
        by="online.engine.class_hooks:install_worker",
        why="workers neither record nor swap",
    ),
    Hook(
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="pace",
        by="online.engine.class_hooks:install_runner",
        why="the draft runs even in steps with 0 draft tokens",
    ),
    Hook(
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="late_drafts",
        by="engine.patches:install_late_drafts",
        why="a client waits for its first token while the draft reads the prompt",
        runner="V1",
    ),
    Hook(
        names=(f"{WORKER_WRAPPER}.initialize_from_config",),
        feature="lookups",
        by="engine.lookup_hooks:install_lookups",
        why="vLLM has no method for counted answers or for a lookup before a head",
    ),
    Hook(
        names=("v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",),
        feature="pace",
        by="online.engine.runner_v2:complete_graphs",
        why="a step has no CUDA graph if the next token count lacks its query length",
        runner="V2",
    ),
    Hook(
        names=(f"{SPECULATORS}.dflash.cudagraph:DFlashCudaGraphManager._init_candidates",),
        feature="pace",
        by="online.engine.runner_v2:without_table",
        why="a block draft captures CUDA graphs for parts of a block, which it never runs",
        runner="V2",
    ),
    Hook(
        # This name is in this module, and must be wrapped before the runner's module imports it.
        names=(f"{SPECULATORS}.adaptive_verification:maybe_create_adaptive_verification_manager",),
        feature="pace",
        by="online.engine.runner_v2:explain_adaptive",
        why="vLLM's refusal of adaptive verification mentions no redraft flag",
        runner="V2",
    ),
    # --- methods of one worker
    Hook(
        of_object=True,
        names=(f"{WORKER}.finish_weight_update",),
        feature="pushes",
        by="online.engine.worker_hooks:watch_pushes",
        why="records still name a registry version after a trainer has pushed another draft",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.reload_weights",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that were replaced",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.start_weight_update",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that were replaced",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.update_weights",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that were replaced",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.finish_weight_update",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that were replaced",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.execute_model",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that another process replaced",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.sleep",),
        feature="sleep",
        by="online.engine.worker_hooks:watch_sleep",
        why="the draft proposes random tokens after sleep at level 2",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.wake_up",),
        feature="sleep",
        by="online.engine.worker_hooks:watch_sleep",
        why="the draft proposes random tokens after sleep at level 2",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.discard",),
        feature="sleep",
        by="online.engine.worker_hooks:watch_sleep",
        why="a draft is loaded into memory that a sleeping worker has released",
    ),
    Hook(
        of_object=True,
        names=(f"{WORKER}.shutdown",),
        feature="capture",
        by="online.engine.worker_hooks:stop_before_shutdown",
        why="the last records are lost when the server stops",
    ),
    Hook(
        of_object=True,
        names=("model_executor.models.qwen3_dflash:DFlashQwen3Model._build_fused_kv_buffers",),
        feature="reload",
        by="engine.patches:without_fused_buffers",
        why="a load copies weights that have no values yet",
    ),
    Hook(
        of_object=True,
        names=(f"{ANY_MODEL}.load_weights",),
        feature="pushes",
        by="online.engine.worker_hooks:_keep_pushes",
        why="a pushed draft overwrites modules shared with the target",
    ),
    Hook(
        of_object=True,
        names=(f"{ANY_MODEL}.load_weights",),
        feature="target_watch",
        by="online.engine.worker_hooks:watch_target",
        why="records name target weights that were replaced",
    ),
    # --- methods of one V1 model runner
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}._sample",),
        feature="capture",
        by="online.engine.runner_v1:_Hooks.sample",
        why="no step is recorded",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}._get_spec_decode_draft_probs",),
        feature="capture",
        by="online.engine.runner_v1:_Hooks.draft_probs",
        why="records lack the draft probabilities",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}._on_request_state_removed",),
        feature="capture",
        by="online.engine.runner_v1:_Hooks.request_removed",
        why="records are never completed",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}._on_request_state_removed",),
        feature="live_counts",
        by="engine.lookup_hooks:end_after",
        why="live counts receive no answers",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.sample_tokens",),
        feature="proposers",
        by="online.engine.runner_v1:Proposers.sample_tokens",
        why="drafts from lookups and padding count as drafts of the served version",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.sample_tokens",),
        feature="capture",
        by="online.engine.runner_v1:_Hooks.sample_tokens",
        why="the recorded logits include a grammar's mask",
        runner="V1",
    ),
    *(
        Hook(
            of_object=True,
            names=(f"{V1_RUNNER}.{name}",),
            feature="late_drafts",
            by=f"engine.patches:LateDrafts.{method}",
            why="a client waits for its first token while the draft reads the prompt",
            runner="V1",
        )
        for name, method in (
            ("propose_draft_token_ids", "propose"),
            ("take_draft_token_ids", "take"),
            ("execute_model", "execute_model"),
        )
    ),
    # The capture receives all hidden states, and a lookup keeps the head's proposal.
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.propose_draft_token_ids",),
        feature="capture",
        by="online.engine.runner_v1:_Hooks.propose",
        why="records lack hidden states",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.propose_draft_token_ids",),
        feature="proposers",
        by="online.engine.runner_v1:Proposers.propose",
        why="padding counts as drafts of the served version",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.propose_draft_token_ids",),
        feature="pace",
        by="online.engine.runner_v1:install_pace",
        why="the draft runs even in steps with 0 draft tokens",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.propose_draft_token_ids",),
        feature="lookups",
        by="engine.lookup_hooks:install",
        why="vLLM supports neither lookups before a head nor counted answers",
        runner="V1",
    ),
    # --- methods of one V2 model runner
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.sample_tokens",),
        feature="proposers",
        by="online.engine.runner_v2:install_proposers",
        why="drafts from lookups count as drafts of the served version, and tokens that adaptive "
        "verification leaves out count as rejected",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.add_requests",),
        feature="capture",
        by="online.engine.runner_v2:_Hooks.add_requests",
        why="no request is recorded",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.finish_requests",),
        feature="capture",
        by="online.engine.runner_v2:_Hooks.finish_requests",
        why="records are never completed",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=("v1.worker.gpu.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask",),
        feature="capture",
        by="online.engine.runner_v2:_Hooks.mask",
        why="the recorded logits include a grammar's mask",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.add_requests",),
        feature="lookups",
        by="engine.lookup_hooks:HostTexts.add_requests",
        why="lookups have no access to a request's prompt",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.finish_requests",),
        feature="lookups",
        by="engine.lookup_hooks:HostTexts.finish_requests",
        why="live counts receive no answers",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(
            "v1.worker.gpu.sample.sampler:Sampler.__call__",
            f"{SPECULATORS}.rejection_sampler:RejectionSampler.__call__",
        ),
        feature="capture",
        by="online.engine.runner_v2:_Hooks.sampled",
        why="no step is recorded",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=PROPOSE,
        feature="capture",
        by="online.engine.runner_v2:_Hooks.propose",
        why="records lack hidden states",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=PROPOSE,
        feature="pace",
        by="online.engine.runner_v2:install_pace",
        why="the draft runs even in steps with 0 draft tokens",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=PROPOSE,
        feature="lookups",
        by="engine.lookup_hooks:LookupOnV2.propose",
        why="vLLM supports neither lookups before a head nor counted answers",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.sample",),
        feature="lookups",
        by="engine.lookup_hooks:LookupOnV2.sample",
        why="lookups have no access to the newest tokens",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{V2_RUNNER}.take_draft_token_ids",),
        feature="lookups",
        by="engine.lookup_hooks:LookupOnV2.take",
        why="the maximum number of draft tokens is verified for each request, even if the "
        "lookup found fewer",
        runner="V2",
    ),
    # --- methods of both model runners, and of the API process
    Hook(
        of_object=True,
        names=(
            f"{V1_RUNNER}.execute_model",
            f"{V2_RUNNER}.execute_model",
        ),
        feature="reread",
        by="online.engine.worker_hooks:reread_before_steps",
        why="after a swap, the new draft attends to keys computed by the old one",
    ),
    Hook(
        of_object=True,
        names=(f"{ENGINE}.generate",),
        feature="origin",
        by="online.engine.routes:forward_origin",
        why="requests have neither a tenant nor a domain",
    ),
    Hook(
        of_object=True,
        names=(f"{CHAT}._effective_chat_template_kwargs",),
        feature="origin",
        by="online.engine.routes:note_arguments",
        why="requests with and without thinking are not distinguished",
    ),
    # --- the comparison of drafters, in a separate process
    Hook(
        of_object=True,
        names=(f"{V1_RUNNER}.propose_draft_token_ids",),
        feature="parity",
        by="engine.parity.dump:Recorder.propose_v1",
        why="the draft tokens of a block are not recorded",
        runner="V1",
    ),
    Hook(
        of_object=True,
        names=PROPOSE,
        feature="parity",
        by="engine.parity.dump:Recorder.propose_v2",
        why="the draft tokens of a block are not recorded",
        runner="V2",
    ),
    Hook(
        of_object=True,
        names=(f"{ANY_MODEL}.forward",),
        feature="parity",
        by="engine.parity.dump:Recorder.forward",
        why="the forward passes of a drafter are not recorded",
    ),
    Hook(
        names=("model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_cpu",),
        feature="native_rotary",
        by="engine.parity.dump:rotate_in_pytorch",
        why="the CPU kernel rounds differently from PyTorch",
    ),
)
"""All hooks. Rows with the same name are in call order: the hook in the first row is called first."""

METHODS = {
    f"{ENGINE_CORE}.redraft_pace": ("pace", "online.engine.pace:answer_pace"),
    f"{ENGINE_CORE}.redraft_domains": ("domains", "online.engine.domains:answer_domains"),
    f"{ENGINE_CORE}.redraft_loads": ("domains", "online.engine.domains:answer_loads"),
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
"""Methods that are added to vLLM's classes, as (feature, function) by name, because vLLM finds
methods for utility calls by name.
"""


class Chain:
    """One name in vLLM: the original call, and the wrappers around it."""

    def __init__(self, owner: Any, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.original = getattr(owner, attribute)
        self._wraps: dict[int, Wrap] = {}

    def put(self, place: int, wrap: Wrap) -> None:
        """Wrap the name at the given position in TABLE's order.

        A second wrap at this position replaces the first.
        """
        self._wraps[place] = wrap
        self._build()

    def drop(self, place: int) -> None:
        """Undo `put`."""
        del self._wraps[place]
        self._build()

    def _build(self) -> None:
        call = self.original
        for each in sorted(self._wraps, reverse=True):
            call = self._wraps[each](call)
        setattr(self.owner, self.attribute, call)


_chains: dict[str, Chain] = {}
_installed: set[str] = set()


def is_installed(feature: str) -> bool:
    """Whether this process has a feature's wrappers. vLLM loads plugins in all processes."""
    return feature in _installed


def install(feature: str) -> None:
    """Wrap a feature's names in this process, and add its methods. Safe to call repeatedly.

    Raises:
        ImportError, AttributeError: this vLLM lacks a name. All names are left unchanged.
    """
    if feature in _installed:
        return
    rows = [
        (place, hook)
        for place, hook in enumerate(TABLE)
        if hook.feature == feature and not hook.of_object
    ]
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
        ValueError: the feature's setting is invalid.
        ImportError, AttributeError: for the same reasons as in `install`.
    """
    if not feature.asked or _load(feature.asked)():
        install(feature.name)


@dataclass(kw_only=True)
class Attached:
    """State that redraft keeps on a vLLM object, in the object's attribute `redraft`."""

    chains: dict[str, Chain] = field(default_factory=dict, repr=False)
    """The wrapped methods, by name."""


@dataclass(kw_only=True)
class RunnerState(Attached):
    """State kept on a model runner."""

    lookup: Any = None
    """The lookup's proposer, which works alone or before a head."""
    counter: Any = None
    """Counter of answers, for live counts."""
    proposers: Any = None
    """With V1, the proposers of the pending draft tokens."""
    late: Any = None
    """With V1, delays the draft until the tokens are sent."""


@dataclass(kw_only=True)
class SchedulerState(Attached):
    """State kept on a scheduler."""

    pacer: Any = None
    """Chooses the number of draft tokens. None if no pace is set."""
    foreign: frozenset[str] = frozenset()
    """Requests in this step whose drafts are not from the served version."""
    admitted: Mapping[str, int] | None = None
    """Number of draft tokens that this step verified, by request. None if it verified all."""
    load: str = ""
    """Load bucket for this step's number of requests."""
    domains: dict[str, list[int]] = field(default_factory=dict)
    """Draft counts by domain."""
    loads: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Draft counts by domain and load, with adaptive verification."""


State = TypeVar("State", bound=Attached)


def attach(owner: Any, state: State) -> State:
    """Attach state to a vLLM object.

    The state takes over the wrapped methods of a previous state.
    """
    if (before := getattr(owner, "redraft", None)) is not None:
        state.chains = before.chains
    owner.redraft = state
    return state


def find_state(owner: Any, kind: type[State]) -> State:
    """Return the state of this kind on a vLLM object. Create it if there is none."""
    state = getattr(owner, "redraft", None)
    return state if isinstance(state, kind) else attach(owner, kind())


def hook(owner: Any, feature: str, **wraps: Wrap) -> None:
    """Wrap methods of one vLLM object, by name, in the order of TABLE.

    If a feature wraps a method again, the new wrapper replaces its earlier one.
    """
    chains = find_state(owner, Attached).chains
    for name, wrap in wraps.items():
        if name not in chains:
            chains[name] = Chain(_own_class(owner) if name.startswith("__") else owner, name)
        chains[name].put(_find_place(feature, name), wrap)


@contextmanager
def hooked(owner: Any, feature: str, **wraps: Wrap) -> Iterator[None]:
    """Apply `hook` until the block ends."""
    hook(owner, feature, **wraps)
    try:
        yield
    finally:
        for name in wraps:
            owner.redraft.chains[name].drop(_find_place(feature, name))


def around(holder: Any, name: str, method: Callable[..., Any]) -> Wrap:
    """Return a wrap that calls `method`, and stores the next call in `holder` as `name`."""

    def wrap(call: Any) -> Callable[..., Any]:
        setattr(holder, name, call)
        return method

    return wrap


def after_start(install: Callable[[Any], None]) -> Wrap:
    """Return a wrap of a worker's start-up that calls `install(worker)` at its end.

    vLLM calls the start-up on every worker after target and draft are loaded, and before the
    warm-up.
    """

    def wrap(initialize: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def initialize_and_install(wrapper: Any, kv_cache_configs: list[Any]) -> None:
            initialize(wrapper, kv_cache_configs)
            install(wrapper.worker)

        return initialize_and_install

    return wrap


def _find_place(feature: str, attribute: str) -> int:
    return next(
        place
        for place, row in enumerate(TABLE)
        if row.of_object and (row.feature, row.attribute) == (feature, attribute)
    )


def _own_class(instance: Any) -> type:
    """Give this object its own class, because Python looks up `__call__` on the class.

    The object itself stays the same, because others hold references to it and check its class.
    """
    cls = type(instance)
    instance.__class__ = type(cls.__name__, (cls,), {})
    return type(instance)


def _load(name: str) -> Any:
    return getattr(*_find(f"redraft.{name}"))


def _find(name: str) -> tuple[Any, str]:
    """Return (object before the last dot of `module:Class.method`, name after it)."""
    module, _, path = name.partition(":")
    owner, (*classes, last) = importlib.import_module(module), path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, last
