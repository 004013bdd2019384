"""Start vLLM's OpenAI server with the redraft plugin.

`redraft serve TARGET --draft DRAFT -- VLLM_ARGS`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from redraft.engine import adaptive
from redraft.engine.command import vllm_command
from redraft.engine.live_file import LiveConfig
from redraft.engine.lookups import lookup_env, needs_plugin, on_device
from redraft.engine.machine import ENGINE_IS_CPU, count_cores
from redraft.engine.server import (
    allow_slow_start,
    engine_dtype,
    find_two_speeds,
    require_servable,
    vllm_keys,
)
from redraft.engine.settings import read_settings, write_settings
from redraft.eval.forecast.draft_source import DraftSource, Lookups
from redraft.files.folder import INDEX, is_hub_name, open_folder, text_sections, weight_files
from redraft.files.folder import read_config as read_model
from redraft.files.private import require_own
from redraft.heads.catalog import find_speculative
from redraft.heads.families.retrieval import LIVE
from redraft.heads.provenance import read_provenance
from redraft.online.engine.config import (
    PLUGIN_NAME,
    TABLE,
    CaptureConfig,
    check_pace,
    make_table,
    read_config,
)
from redraft.online.fleet.registry import Registry
from redraft.online.records.nats_config import hide_credentials
from redraft.recipes.serve.serve_config import ServeConfig
from redraft.recipes.serve.vllm_flags import (
    BESIDE_A_DRAFT,
    LOOKUP_WAITS,
    ON_THE_GPU,
    SHARED_BY_TENANTS,
    SHARED_COUNTS,
    Beside,
    is_many,
    is_on,
    list_warnings,
    read_flags,
    require_agreement,
    require_private,
    require_same_weights,
)

PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""vLLM's variable that lists the prefixes of environment variables to copy to Ray workers.

Workers on other machines do not inherit variables.
"""


SHUTDOWN_TIMEOUT_S = 30
"""vLLM's --shutdown-timeout: the time after SIGTERM in which running answers may finish and waiting
records may be written. With vLLM's default of 0, workers and their records are killed at once.
"""

POLLED = "/health,/metrics,/redraft/status,/load"
"""Routes that probes, Prometheus, a learner and `redraft up` request all the time, which vLLM would
log each time.
"""

MODEL_FLAGS = ("method", "draft_sample_method", "rejection_sample_method")
"""Options that do not apply to a lookup without a head."""


def main(cfg: ServeConfig) -> None:
    environment = {**os.environ, **allow_slow_start(os.environ)}
    environment |= plugin_environment(cfg, os.environ)
    read_config(environment)  # report a wrong setting now, not after vLLM has spent minutes loading
    require_private(read_flags(cfg.vllm_args), os.environ)
    require_same_weights(cfg.target, os.environ)
    require_target(cfg.target)
    command = server_command(cfg)
    _draft(cfg).require_package()
    cfg.capture.make_spool()
    notes = list_notes(_draft(cfg), tenants_share=cfg.live.shared, is_ahead=schedules_ahead(cfg))
    notes += note_template(_draft(cfg).folder, read_flags(cfg.vllm_args))
    notes += describe_recording(cfg.capture)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for warning in list_warnings(
        read_flags(cfg.vllm_args), cfg.target, _draft(cfg).folder, speculative_config(cfg)
    ):
        print(f"warning: {warning}", file=sys.stderr)
    if ENGINE_IS_CPU and (warning := find_two_speeds(environment, count_cores())):
        print(f"warning: {warning}", file=sys.stderr)
    if cfg.pace != "off" and keeps_states(cfg.target):
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if looks_up(_draft(cfg)) and schedules_ahead(cfg):
            require_v2(environment)
    lookup = lookup_env(speculative_config(cfg), read_settings(environment))
    # Use exec, not a child process, so that signals from systemd or Kubernetes reach vLLM directly.
    os.execve(command[0], command, environment | lookup)


def describe_recording(capture: CaptureConfig) -> list[str]:
    """Describe which requests are recorded, and where; empty if nothing is."""
    if not capture.is_on:
        return []
    place = capture.spool or hide_credentials(capture.ingest)
    return [f"records {capture.share} as text in {place} (--capture.fraction, --capture.tenants)"]


def list_notes(
    draft: DraftSource | None,
    *,
    tenants_share: bool = False,
    is_ahead: bool = False,
    on_cpu: bool = ENGINE_IS_CPU,
) -> list[str]:
    """List the notes to print before a server with this draft starts.

    `draft` is None for a new head. `is_ahead` means that the user enabled asynchronous scheduling.
    """
    notes = [BESIDE_A_DRAFT]
    if draft is None:
        return notes
    # vLLM never schedules asynchronously on CPUs.
    if looks_up(draft) and not (on_cpu or is_ahead):
        notes.append(LOOKUP_WAITS + (ON_THE_GPU if draft.has_answers else ""))
    if LIVE in (draft.source, draft.lookup):
        notes.append(SHARED_BY_TENANTS if tenants_share else SHARED_COUNTS)
    return notes


def note_template(draft: Path | None, flags: Mapping[str, str]) -> Iterator[str]:
    """Yield a line if requests without template arguments do not get the template's defaults."""
    if draft is None or "default_chat_template_kwargs" in flags:
        return
    for arguments in template_arguments(draft)[1:]:
        yield (
            f"requests that set no chat_template_kwargs get {arguments}, as most of the draft's "
            "training answers did; the answers can differ from those of plain vLLM. For the "
            "template's defaults, add -- --default-chat-template-kwargs '{}'"
        )


def looks_up(draft: DraftSource) -> bool:
    """Whether this draft uses a lookup, alone or before a head."""
    return draft.lookup is not None or draft.is_lookup  # the head's folder may not exist yet


def require_target(target: str) -> None:
    """Raise an error unless the target is a folder, a hub name, a storage URL or a GGUF file."""
    if Path(target).is_file() and not target.endswith(".gguf"):
        raise NotADirectoryError(f"{target} is a file: the target is a model folder or a hub name")
    if "://" not in target and not is_hub_name(target) and not Path(target).exists():
        raise FileNotFoundError(
            f"there is no model folder {target}, and it is not a hub name (owner/name) either"
        )


def server_command(cfg: ServeConfig) -> list[str]:
    """Return the command line of vLLM's server.

    Raises:
        ValueError: neither a draft nor a registry is given, or vLLM cannot serve the draft with
            these settings.
        FileNotFoundError: the registry has no version.
    """
    if (Path(cfg.target) / INDEX).is_file():
        weight_files(Path(cfg.target))  # vLLM would have to choose between two sets of weights
    draft = _draft(cfg)
    folder = draft.folder
    parts = list_parts(draft, records=cfg.capture.is_on, method=cfg.method)
    parts += [] if cfg.pace in ("off", "adaptive") else ["pace"]
    flags = read_flags(cfg.vllm_args)
    require_agreement(cfg.vllm_args, flags, cfg.target, parts)
    draft.require_layer(cfg.target)
    config = speculative_config(cfg)
    if cfg.live.folder is not None:
        require_own(cfg.live.folder)
        if is_many(flags.get("nnodes", "1")) or flags.get("distributed_executor_backend") == "ray":
            raise ValueError(
                "--live.folder supports only a single machine, but --nnodes or Ray uses several: "
                "remove --live.folder"
            )
    if needs_plugin(config) and is_many(flags.get("pipeline_parallel_size", "1")):
        raise ValueError(
            "with --pipeline-parallel-size above 1, only the first stage has the text of requests, but "
            f"the last stage needs it to look up {draft}: use --tensor-parallel-size"
        )
    arguments = ["--speculative-config", json.dumps(vllm_keys(config))]
    arguments += ["--disable-access-log-for-endpoints", POLLED]
    arguments += template_arguments(folder) if folder else []
    if cfg.capture.is_on:
        arguments += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    # Our arguments come before the user's, which take precedence.
    return vllm_command(
        cfg.target, ["--dtype", engine_dtype(cfg.target), *arguments, *cfg.vllm_args]
    )


def list_parts(
    draft: DraftSource | None, *, records: bool, method: str | None = None
) -> list[Beside]:
    """List the active parts of redraft, named as in `CLASHES`.

    `draft` is None for a new head. `method` is vLLM's method for the draft, if the user gives one.
    """
    parts: list[Beside] = ["records"] if records else []
    if draft is not None and looks_up(draft) and not draft.has_answers:
        parts.append("lookup")
    if draft is not None and draft.is_lookup:
        return parts
    parts.append("model")
    if draft is None:
        return [*parts, "head"]
    # By vLLM's method, because redraft has no module for some drafts that vLLM serves.
    model = draft if draft.lookup is None else draft.parts[1]
    family = find_speculative(model.speculative(method=method))
    return parts if family is not None and not family.is_head else [*parts, "head"]


def template_arguments(draft: Path) -> list[str]:
    """Return vLLM's arguments that set the chat template options used to train the draft.

    For example, the options may ask for answers without reasoning.
    """
    found = read_provenance(draft).template_arguments
    return ["--default-chat-template-kwargs", json.dumps(found)] if found else []


def speculative_config(cfg: ServeConfig) -> dict[str, Any]:
    """Return vLLM's speculative config: the draft and how to serve it.

    Raises:
        ValueError, FileNotFoundError: for the same reasons as `server_command`.
    """
    draft = _draft(cfg)
    _refuse_idle(cfg, draft)
    lookups = Lookups(verify_cost=cfg.verify_cost, head_requests=cfg.head_requests)
    config = draft.speculative(cfg.draft_sample_method, lookups, method=cfg.method)
    if needs_plugin(config) and schedules_ahead(cfg):
        require_v2()
        config = on_device(config)
    config["num_speculative_tokens"] = cfg.num_speculative_tokens
    if cfg.rejection_sample_method == "block":
        require_block(config)
        config["rejection_sample_method"] = "block"
    require_servable(config)
    if check_pace(cfg.pace, cfg.num_speculative_tokens) != "off":
        is_adaptive = choose_adaptive(cfg.pace, read_flags(cfg.vllm_args), cfg.target, config)
        config |= {adaptive.KEY: True} if is_adaptive else {}
        config[TABLE] = make_table(cfg.num_speculative_tokens, is_adaptive=is_adaptive)
    return config


def schedules_ahead(cfg: ServeConfig) -> bool:
    """Whether the user asks for asynchronous scheduling, which vLLM disables for a lookup."""
    return is_on(read_flags(cfg.vllm_args).get("async_scheduling", "false"))


def require_v2(
    environment: Mapping[str, str] = os.environ, *, on_cpu: bool = ENGINE_IS_CPU
) -> None:
    """Raise ValueError unless counted answers can be looked up on the device."""
    if on_cpu or environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise ValueError(
            "--async-scheduling looks counted answers up on the GPU, which requires a GPU and vLLM's "
            "V2 model runner: remove the flag"
        )


def require_block(
    speculative: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ValueError if this draft does not support, or benefit from, block verification."""
    if speculative.get("draft_sample_method") != "probabilistic":
        raise ValueError(
            "--rejection-sample-method block has no effect on greedy draft tokens: add "
            "--draft-sample-method probabilistic and use a draft that supports sampling"
        )
    asked = environment.get("VLLM_USE_V2_MODEL_RUNNER", "0" if ENGINE_IS_CPU else "1")
    if asked == "0":
        raise ValueError(
            "only vLLM's V2 model runner supports block verification, but V1 would serve this draft: "
            "remove --rejection-sample-method block"
        )


def choose_adaptive(
    pace: str, flags: Mapping[str, str], target: str, speculative: Mapping[str, Any]
) -> bool:
    """Whether to enable vLLM's adaptive verification.

    It is enabled if `pace` is `adaptive`, or if `pace` is `auto` and the server is known to support
    it. `flags` are the flags of `vllm serve`, by name.

    Raises:
        ValueError: `pace` is `adaptive`, but this server does not support adaptive verification.
    """
    if pace not in ("auto", "adaptive"):
        return False
    obstacle = adaptive.find_obstacle(flags, target, speculative)
    if pace == "auto":
        capability = adaptive.read_capability()
        return not obstacle and adaptive.is_expected(flags, target, capability)
    if obstacle:
        raise ValueError(f"--pace adaptive {obstacle}, or use --pace auto")
    return True


def _refuse_idle(cfg: ServeConfig, draft: DraftSource) -> None:
    """Raise ValueError for a flag that has no effect on this draft."""
    if draft.lookup is None and draft.is_lookup:
        changed = (name for name in MODEL_FLAGS if getattr(cfg, name) != getattr(ServeConfig, name))
        if flag := next(changed, None):
            raise ValueError(
                f"--{flag.replace('_', '-')} applies only to models, but {draft} is a lookup"
            )
    if cfg.live != LiveConfig() and LIVE not in (draft.source, draft.lookup):
        raise ValueError(f"--live... applies only to live counts (--draft {LIVE}), not to {draft}")
    if cfg.verify_cost is not None and not draft.has_answers:
        raise ValueError(
            f"--verify-cost applies only to counted answers (`redraft data count`), not to {draft}"
        )
    if cfg.head_requests is not None and draft.lookup is None:
        head = "HEAD" if draft.is_lookup else draft.source
        raise ValueError(
            f"--head-requests applies only to a head after a lookup: set --draft ngram+{head}, "
            f"live+{head} or ANSWERS+{head}"
        )


def plugin_environment(cfg: ServeConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that enable and configure the plugin, to be added to `environment`."""
    capture, nats = cfg.capture, cfg.capture.nats
    prefixes = map(str.strip, environment.get(RAY_PREFIXES, "").split(","))
    settings = {
        "registry": _absolute(cfg.registry),
        "token_file": _absolute(cfg.token_file),
        "allow_remote": cfg.allow_remote or None,
        "targets": [str(path.absolute()) for path in cfg.targets] or None,
        "swap": asdict(cfg.swap),
        "live": asdict(cfg.live) | {"folder": _absolute(cfg.live.folder)}
        if cfg.live != LiveConfig()
        else None,
        "pace": None if cfg.pace == "off" else cfg.pace,
        "capture": {"tenants": list(capture.tenants)} if capture.tenants else None,  # live counts
    }
    if capture.is_on:
        files = {
            name: _absolute(getattr(nats, name)) for name in ("credentials", "ca", "certificate")
        }
        settings["capture"] = asdict(capture) | {
            "spool": _absolute(capture.spool),
            "nats": {"fleet": nats.fleet, **files},
        }
    # If None, a setting from the user's environment remains in force.
    given = {name: value for name, value in settings.items() if value is not None}
    return {
        "VLLM_PLUGINS": with_plugin(environment.get("VLLM_PLUGINS")),
        RAY_PREFIXES: ",".join(dict.fromkeys([*filter(None, prefixes), "REDRAFT_"])),
        **write_settings(read_settings(environment), given),
    }


def keeps_states(target: str) -> bool:
    """Whether the target has Mamba layers or short convolutions.

    If the number of draft tokens varies, vLLM's V2 runner captures graphs that these layers do not
    support.
    """
    keys = [key for section in text_sections(read_model(open_folder(target))) for key in section]
    return any(key.startswith(("mamba_", "ssm_", "conv_L")) for key in keys)


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None


def with_plugin(allowed: str | None) -> str:
    """Return the value of VLLM_PLUGINS with redraft added.

    If the variable is unset, vLLM allows all plugins, so the result names all of them.
    """
    if allowed is None:
        names = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    else:
        names = {name for name in allowed.split(",") if name}
    return ",".join(sorted(names | {PLUGIN_NAME}))


def _draft(cfg: ServeConfig) -> DraftSource:
    if cfg.draft is not None:
        return DraftSource.parse(cfg.draft)
    if cfg.registry is None:
        raise ValueError(
            "there is no draft to serve: set --draft, or --registry to serve its current version"
        )
    current = cfg.registry / "current"
    if not current.is_dir():  # e.g. in object storage, which has no links
        registry = Registry.open(cfg.registry)
        current = registry.path(registry.choose_current())
    return DraftSource(source=str(current))
