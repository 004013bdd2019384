"""Names, signatures and attributes of vLLM that redraft touches.

They are compared with vLLM's source without importing it.

    redraft's source ─► imports from vllm, attributes of the objects in OBJECTS ─┐
    TABLE of hooks, CALLED, TEXTS ───────────────────────────────────────────────┴─► is it in vLLM's?

What is touched is read from redraft's source, so a new attribute in a hook is checked without a new
line here. OBJECTS only says which of vLLM's classes an expression is.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redraft.engine import counters
from redraft.engine.hooks import ENGINE, SPECULATORS, TABLE, V1_RUNNER, V2_RUNNER, WORKER
from redraft.recipes.serve.serve import RAY_PREFIXES

ROOT = Path(__file__).parents[2]

VLLM_CONFIG, SPECULATIVE = "config.vllm:VllmConfig", "config.speculative:SpeculativeConfig"
CACHED_REQUEST = "v1.worker.gpu_input_batch:CachedRequestState"
NEW_REQUEST = "v1.core.sched.output:NewRequestData"

OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "online/engine/runner_v1.py": {
        "runner": (V1_RUNNER,),
        "self.runner": (V1_RUNNER,),
        "runner.input_batch": ("v1.worker.gpu_input_batch:InputBatch",),
        "runner.query_start_loc": ("v1.utils:CpuGpuBuffer",),
        "runner.discard_request_mask": ("v1.utils:CpuGpuBuffer",),
        "metadata": ("v1.spec_decode.metadata:SpecDecodeMetadata",),
        "scheduled": ("v1.core.sched.output:SchedulerOutput",),
        "speculative": (SPECULATIVE,),
        "output": ("v1.outputs:SamplerOutput",),
        "runner.drafter": ("v1.spec_decode.draft_model:DraftModelProposer",),
        "request": (CACHED_REQUEST,),
        "state": ("v1.worker.gpu_model_runner:ExecuteModelState",),
    },
    "online/engine/runner_v2.py": {
        "runner": (V2_RUNNER,),
        "self.runner": (V2_RUNNER,),
        "runner.speculator": ("v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",),
        "runner.req_states": ("v1.worker.gpu.states:RequestState",),
        "self.runner.sampler": ("v1.worker.gpu.sample.sampler:Sampler",),
        "self.runner.sampler.sampling_states": ("v1.worker.gpu.sample.states:SamplingStates",),
        "self.runner.sampler.sampling_states.temperature": (
            "v1.worker.gpu.buffer_utils:UvaBackedTensor",
        ),
        "batch": ("v1.worker.gpu.input_batch:InputBatch",),
        "manager": (f"{SPECULATORS}.adaptive_verification:AdaptiveVerificationManager",),
        "output": (
            "v1.worker.gpu.sample.output:SamplerOutput",
            "v1.worker.gpu.async_utils:AsyncOutput",
        ),
        "output.sampler_output": ("v1.worker.gpu.sample.output:SamplerOutput",),
        "scheduler_output": ("v1.core.sched.output:SchedulerOutput",),
        "request": (NEW_REQUEST,),
        "states": ("v1.worker.gpu.states:RequestState",),
        "states.all_token_ids": ("v1.worker.gpu.buffer_utils:StagedWriteTensor",),
    },
    "online/engine/reread.py": {
        "runner": (V1_RUNNER, V2_RUNNER),
        "self.proposer": (
            "v1.spec_decode.draft_model:DraftModelProposer",
            "v1.worker.gpu.spec_decode.standalone_ar.speculator:StandaloneARSpeculator",
        ),
        "scheduler_output": ("v1.core.sched.output:SchedulerOutput",),
        "new": (NEW_REQUEST,),
        "known": ("v1.core.sched.output:CachedRequestData",),
        "group": ("v1.worker.utils:AttentionGroup",),
        "groups[0]": ("v1.worker.utils:AttentionGroup",),
        "groups[0].kv_cache_spec": ("v1.kv_cache_interface:AttentionSpec",),
        "group.kv_cache_spec": ("v1.kv_cache_interface:FullAttentionSpec",),
        "parallel": ("config.parallel:ParallelConfig",),
        "CommonAttentionMetadata": ("v1.attention.backend:CommonAttentionMetadata",),
        "ranks": ("distributed.parallel_state:GroupCoordinator",),
    },
    "online/engine/slices.py": {},
    "online/engine/feed.py": {
        "request": (CACHED_REQUEST, NEW_REQUEST),
        "params": ("sampling_params:SamplingParams",),
    },
    "online/engine/runners.py": {"vllm_config": (VLLM_CONFIG,), "speculative": (SPECULATIVE,)},
    "online/engine/worker_hooks.py": {
        "worker": (WORKER,),
        "rereader.runner": (V1_RUNNER, V2_RUNNER),
        "worker.model_runner": (V1_RUNNER, V2_RUNNER),
        "runner": (V1_RUNNER, V2_RUNNER),
        "worker.vllm_config": (VLLM_CONFIG,),
        "worker.vllm_config.speculative_config": (SPECULATIVE,),
    },
    "online/engine/worker.py": {
        "worker": (WORKER,),
        "worker.model_runner": (V1_RUNNER, V2_RUNNER),
        "runner": (V1_RUNNER, V2_RUNNER),
        "worker.vllm_config": (VLLM_CONFIG,),
        "worker.vllm_config.model_config": ("config.model:ModelConfig",),
        "speculative": (SPECULATIVE,),
    },
    "online/engine/target_watch.py": {
        "worker": (WORKER,),
        "worker.model_runner": (V1_RUNNER, V2_RUNNER),
        "worker.vllm_config": (VLLM_CONFIG,),
        "vllm_config": (VLLM_CONFIG,),
        "config": ("config.model:ModelConfig",),
    },
    "online/engine/weight_transfer.py": {
        "worker": (WORKER,),
        "worker.model_runner": (V1_RUNNER, V2_RUNNER),
        "self.worker.model_runner": (V1_RUNNER, V2_RUNNER),
    },
    "online/engine/class_hooks.py": {
        "engine": ("v1.engine.core:EngineCore",),
        "wrapper.worker": (WORKER,),
        "scheduler_output": ("v1.core.sched.output:SchedulerOutput",),
        "scheduler": ("v1.core.sched.scheduler:Scheduler",),
        "scheduler.scheduler_config": ("config.scheduler:SchedulerConfig",),
        "request": ("v1.request:Request",),
        "params": ("sampling_params:SamplingParams",),
    },
    "online/engine/routes.py": {
        "engine_client": (ENGINE,),
        "vllm_config": (VLLM_CONFIG,),
        "vllm_config.model_config": ("config.model:ModelConfig",),
        "speculative": (SPECULATIVE,),
        "sampling_params": ("sampling_params:SamplingParams",),
    },
    "online/engine/engine_calls.py": {"self.engine": (ENGINE,)},
    "online/engine/swap_transaction.py": {
        "self.engine": (ENGINE,),
        "engine": (ENGINE,),
        "vllm_config": (VLLM_CONFIG,),
        "vllm_config.model_config": ("config.model:ModelConfig",),
        "parallel": ("config.parallel:ParallelConfig",),
    },
    "online/engine/domains.py": {
        "scheduler": ("v1.core.sched.scheduler:Scheduler",),
        "engine": ("v1.engine.core:EngineCore",),
        "scheduled": ("v1.core.sched.output:SchedulerOutput",),
        "scheduled.scheduled_cached_reqs": ("v1.core.sched.output:CachedRequestData",),
        "request": (NEW_REQUEST,),
    },
    "online/engine/pace.py": {
        "vllm_config": (VLLM_CONFIG,),
        "vllm_config.parallel_config": ("config.parallel:ParallelConfig",),
        "vllm_config.model_config": ("config.model:ModelConfig",),
        "speculative": (SPECULATIVE,),
        "output": ("v1.core.sched.output:SchedulerOutput",),
        "scheduled": ("v1.core.sched.output:SchedulerOutput",),
        "result": ("v1.outputs:ModelRunnerOutput",),
        "request": ("v1.request:Request",),
        "scheduler": ("v1.core.sched.scheduler:Scheduler",),
        "scheduler.scheduler_config": ("config.scheduler:SchedulerConfig",),
        "runner": (V1_RUNNER,),
    },
    "online/engine/pace_memory.py": {
        "vllm_config": (VLLM_CONFIG,),
        "vllm_config.parallel_config": ("config.parallel:ParallelConfig",),
        "vllm_config.scheduler_config": ("config.scheduler:SchedulerConfig",),
        "vllm_config.speculative_config": (SPECULATIVE,),
        "speculative": (SPECULATIVE,),
        "model": ("config.model:ModelConfig",),
        "draft": ("config.model:ModelConfig",),
        "current_platform": ("platforms.interface:Platform",),
    },
    "online/engine/swap.py": {
        "worker": (WORKER,),
        "runner": (V1_RUNNER, V2_RUNNER),
        "vllm_config": (VLLM_CONFIG,),
        "vllm_config.speculative_config": (SPECULATIVE,),
    },
    "redraft/engine/wait.py": {
        "current_platform": ("platforms.interface:Platform",),
    },
    "redraft/engine/lookups.py": {
        "self.runner": (V1_RUNNER,),
        "batch": ("v1.worker.gpu_input_batch:InputBatch",),
        "scheduled": ("v1.core.sched.output:SchedulerOutput",),
    },
    "redraft/engine/live_file.py": {
        "runner.vllm_config": (VLLM_CONFIG,),
        "runner.vllm_config.model_config": ("config.model:ModelConfig",),
        "parallel": ("config.parallel:ParallelConfig",),
    },
    "redraft/engine/lookup_hooks.py": {
        "runner": (V2_RUNNER,),
        "self.runner": (V2_RUNNER,),
        "self.runner.req_states": ("v1.worker.gpu.states:RequestState",),
        "batch": ("v1.worker.gpu.input_batch:InputBatch",),
        "output": ("v1.worker.gpu.sample.output:SamplerOutput",),
        "scheduler_output": ("v1.core.sched.output:SchedulerOutput",),
    },
    "redraft/engine/lookup_on_device.py": {
        "runner": (V2_RUNNER,),
        "self.runner": (V2_RUNNER,),
        "states": ("v1.worker.gpu.states:RequestState",),
        "self.runner.req_states": ("v1.worker.gpu.states:RequestState",),
        "speculator": ("v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",),
        "config": (SPECULATIVE,),
        "batch": ("v1.worker.gpu.input_batch:InputBatch",),
        "self.request": (NEW_REQUEST,),
        "scheduler_output": ("v1.core.sched.output:SchedulerOutput",),
    },
    "redraft/engine/lookup_first.py": {
        "runner": (V1_RUNNER,),
        "self.runner": (V1_RUNNER,),
        "runner.vllm_config": (VLLM_CONFIG,),
        "speculative": (SPECULATIVE,),
        "self.ngrams": ("v1.spec_decode.ngram_proposer:NgramProposer",),
        "batch": ("v1.worker.gpu_input_batch:InputBatch",),
        "scheduled": ("v1.core.sched.output:SchedulerOutput",),
    },
    "online/engine/copies.py": {
        "block": ("model_executor.models.qwen3_dflash:DFlashQwen3Model",),
        "runner.speculator": ("v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator",),
        "getattr(runner, 'speculator', None)": (
            "v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator",
        ),
        "getattr(runner, 'drafter', None)": (
            "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer",
        ),
    },
}
"""vLLM's classes of the expressions in our files. An attribute must exist in all of
its expression's.
"""

CALLED = (
    f"{V1_RUNNER}.get_draft_model",
    "v1.worker.utils:AttentionGroup.build_metadata_for_drafting",
    "forward_context:set_forward_context",
    f"{V2_RUNNER}.get_draft_model",
    "v1.engine.core:EngineCore.collective_rpc",
    f"{ENGINE}.pause_generation",
    f"{ENGINE}.resume_generation",
    f"{ENGINE}.is_paused",
    f"{ENGINE}.reset_prefix_cache",
    f"{ENGINE}.reset_encoder_cache",
    f"{ENGINE}.collective_rpc",
    "v1.engine.core_client:DPLBAsyncMPClient.call_utility_all_async",
    f"{V1_RUNNER}._copy_valid_sampled_token_count",
    "v1.spec_decode.draft_model:DraftModelProposer.prepare_next_token_ids_padded",
    "model_executor.model_loader.reload:initialize_layerwise_reload",
    "model_executor.model_loader.reload:finalize_layerwise_reload",
    "model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "model_executor.model_loader.reload.layerwise:_place_kernel_tensors",
    "config:set_current_vllm_config",
    f"{V1_RUNNER}.get_model",
    f"{V2_RUNNER}.get_model",
    "v1.spec_decode.ngram_proposer:NgramProposer.propose",
)
"""Functions and methods that we call."""

CALLABLES = tuple(dict.fromkeys((*(name for hook in TABLE for name in hook.names), *CALLED)))
"""What we wrap or call."""

TEXTS = {
    "plugins/__init__.py": ("vllm.general_plugins", "vllm.endpoint_plugins"),
    "v1/spec_decode/metrics.py": tuple(
        f"{counters.SPEC_DECODE}{name.removesuffix('_total')}"
        for name in (
            counters.DRAFTS,
            counters.DRAFT_TOKENS,
            counters.ACCEPTED,
            counters.ACCEPTED_PER_POSITION,
        )
    ),
    "v1/metrics/loggers.py": (
        counters.DECODE_TIME.rstrip("_"),
        counters.PREFILL_TIME.rstrip("_"),
        *(f"{counters.PREFIX_CACHE}{name}" for name in ("queries", "hits")),
    ),
    "model_executor/layers/utils.py": ("layer.cpu_linear =",),
    "config/vllm.py": ("VLLM_USE_V2_MODEL_RUNNER", "per_request_spec_decode_metrics"),
    "envs.py": ("VLLM_CPU_OMP_THREADS_BIND", RAY_PREFIXES),
    "ray/ray_env.py": (RAY_PREFIXES,),
}
"""Names of counters, variables and groups of plugins, by the file of vLLM with them."""


@dataclass(frozen=True)
class Vllm:
    """The source of one vLLM: the folder of its package."""

    folder: Path

    def lacks(self) -> list[str]:
        """Everything touched that this vLLM does not have, one line each."""
        return [
            *(f"{where}: {name}" for where, name in list_imports() if not self._has_import(name)),
            *(
                f"{where}: {chain}, {name} has no {attribute}"
                for where, chain, name, attribute in list_attributes()
                if not self._has_attribute(name, attribute)
            ),
            *(f"no {name}" for name in CALLABLES if self.signature(name) is None),
            *(
                f"no {text} in {file}"
                for file, texts in TEXTS.items()
                for text in texts
                if not self._holds(file, text)
            ),
        ]

    def changed(self, known: Vllm) -> list[str]:
        """Callables that no longer take what they take in `known`.

        A parameter renamed, moved, gone or needed now.
        """
        return [
            f"{name}{_describe(mine)} was {_describe(theirs)}"
            for name in CALLABLES
            if (mine := self.signature(name))
            and (theirs := known.signature(name))
            and not _accepts(mine, theirs)
        ]

    def signature(self, name: str) -> ast.arguments | None:
        """The parameters of "module:function" or "module:Class.method"; None if it is not there."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        if not rest:
            found = self._find(module, first)
            return (
                found[1].args
                if found and isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef)
                else None
            )
        for cls in self._lineage(module, first):
            for node in cls.body:
                if (
                    isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    and node.name == rest[0]
                ):
                    return node.args
        return None

    def members(self, name: str) -> set[str]:
        """Attributes and methods of "module:Class".

        Those of its bases and of its instances are included.
        """
        module, _, cls = name.partition(":")
        return {member for each in self._lineage(module, cls) for member in _list_members(each)}

    def _has_attribute(self, name: str, attribute: str) -> bool:
        """Whether "module:Class" has an attribute."""
        return attribute in self.members(name)

    def _holds(self, file: str, text: str) -> bool:
        path = self.folder / file
        return path.is_file() and text in path.read_text()

    def _has_import(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        return self._path(name) is not None or (
            self._path(module) is not None and self._defines(module, last)
        )

    def _defines(self, module: str, name: str) -> bool:
        for node in ast.walk(self._tree(module)):
            named = {
                getattr(node, "id", ""),
                getattr(node, "name", ""),
                getattr(node, "asname", ""),
            }
            if name in named - {None, ""}:
                return True
            is_star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
            if is_star and (source := self._resolve(module, node)) and self._defines(source, name):
                return True
            # a module names what it loads late in a dict of strings
            if isinstance(node, ast.Constant) and node.value == name:
                return True
        return False

    def _lineage(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """A class and all its bases in vLLM."""
        found = self._find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return
        yield found[1]
        for base in found[1].bases:
            node = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(node, ast.Name):
                yield from self._lineage(found[0], node.id)

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The module and the statement that defines a name, through imports."""
        if self._path(module) is None:
            return None
        for node in ast.walk(self._tree(module)):
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == name
            ):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and (
                        source := self._resolve(module, node)
                    ):
                        return self._find(source, alias.name)
        return None

    def _resolve(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return (
                (node.module or "").removeprefix("vllm").lstrip(".")
                if (node.module or "").startswith("vllm")
                else ""
            )
        path = self._path(module)
        assert path is not None
        parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        return ".".join(
            [*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])]
        )

    def _path(self, module: str) -> Path | None:
        folder = self.folder.joinpath(*filter(None, module.split(".")))
        return next(
            (
                path
                for path in (folder / "__init__.py", folder.with_suffix(".py"))
                if path.is_file()
            ),
            None,
        )

    def _tree(self, module: str) -> ast.Module:
        path = self._path(module)
        assert path is not None
        return _parse(path)


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_imports() -> list[tuple[str, str]]:
    """Everything that the plugin imports from vLLM: our file, and the name below `vllm`."""
    return [
        (
            str(path.relative_to(ROOT)),
            f"{node.module}.{alias.name}".removeprefix("vllm").lstrip("."),
        )
        for folder in ("online/engine", "redraft/engine")
        for path in sorted((ROOT / folder).glob("*.py"))
        for node in ast.walk(_parse(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    ]


def list_attributes() -> list[tuple[str, str, str, str]]:
    """Our file, an expression in it, vLLM's class, and an attribute.

    The class comes before the expression's last dot, the attribute after it.
    """
    found = set()
    for file, objects in OBJECTS.items():
        for node in ast.walk(_parse(ROOT / file)):
            for owner, attribute in _read_attribute(node):
                if not attribute.startswith(("redraft", "__")):
                    found |= {
                        (file, f"{owner}.{attribute}", cls, attribute)
                        for cls in objects.get(owner, ())
                    }
    return sorted(found)


def _read_attribute(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute):
        yield ast.unparse(node.value), node.attr
    elif (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and isinstance(node.args[1], ast.Constant)
    ):
        yield ast.unparse(node.args[0]), node.args[1].value
    elif isinstance(node, ast.Call):  # the fields of a dataclass of vLLM that we make
        yield from (
            (ast.unparse(node.func), keyword.arg) for keyword in node.keywords if keyword.arg
        )


def _list_members(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _accepts(new: ast.arguments, old: ast.arguments) -> bool:
    """Whether every call that fits the old parameters fits the new ones, with the same meaning."""
    new_names, old_names = ([each.arg for each in (*a.posonlyargs, *a.args)] for a in (new, old))
    num_needed = len(new_names) - len(new.defaults)
    keywords = {each.arg for each in new.kwonlyargs}
    needed = {
        each.arg
        for each, default in zip(new.kwonlyargs, new.kw_defaults, strict=True)
        if default is None
    }
    return (
        new_names[: len(old_names)] == old_names
        and num_needed <= len(old_names)
        and {each.arg for each in old.kwonlyargs} <= keywords | set(new_names)
        and needed <= {each.arg for each in old.kwonlyargs}
    )


def _describe(arguments: ast.arguments) -> str:
    return f"({ast.unparse(arguments)})"
