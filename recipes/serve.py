"""vLLM's OpenAI server with the plugin switched on: `redraft serve TARGET --draft D -- any vLLM argument`.

    $ redraft serve meta-llama/Llama-3.1-8B-Instruct --registry drafts/llama8b --capture.spool spool -- --port 8001

Everything behind `--` goes to vLLM as it is. The plugin reads its settings from the environment (REDRAFT_...), which
this command fills in: a deployment that starts vLLM by itself sets VLLM_PLUGINS=redraft and those variables instead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from online.plugin_config import PLUGIN_NAME, CaptureConfig, read_config
from recipes.cli import run_recipe

PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

Method = Literal["draft_model", "eagle", "eagle3", "medusa", "mtp"]


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Annotated[str, tyro.conf.Positional]
    """The target: a folder or a hub name."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Behind `--`: further arguments of vLLM's server."""
    draft: str | None = None
    """The draft: a folder or a hub name. Default: the current version of the registry."""
    registry: Path | None = None
    """Folder of the draft's versions (v000001, ..., current); swapping needs it."""
    num_speculative_tokens: int = 3
    """Tokens drafted at a time."""
    method: Method | None = None
    """How vLLM runs the draft; default: what its configuration says."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """Greedy drafts accept p(argmax q), sampled ones sum min(p, q), which is more above temperature 0."""
    token_file: Path | None = None
    """File with the bearer token of /redraft/...; or set REDRAFT_TOKEN."""
    allow_remote: bool = False
    """Let other machines use /redraft/... too."""
    capture: CaptureConfig = field(default_factory=CaptureConfig)


def main(cfg: Config) -> None:
    environment = os.environ | plugin_environment(cfg, os.environ)
    read_config(environment)  # a wrong setting is told here, not by a server that has loaded for minutes
    command = server_command(cfg)
    os.execve(command[0], command, environment)


def server_command(cfg: Config) -> list[str]:
    """The command line of vLLM's server.

    Raises: ValueError without a draft; FileNotFoundError for a folder that is not there.
    """
    draft = _draft(cfg)
    speculative = {
        "model": draft,
        "method": cfg.method or _method(draft),
        "num_speculative_tokens": cfg.num_speculative_tokens,
        "draft_sample_method": cfg.draft_sample_method,
    }
    # Not the `vllm` command: it fails where the distribution has another name, as the CPU build has.
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", cfg.target]
    return [*server, "--speculative-config", json.dumps(speculative), *cfg.vllm_args]


def plugin_environment(cfg: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that switch the plugin on, beside those of `environment`."""
    capture = cfg.capture
    variables = {
        "VLLM_PLUGINS": _with_plugin(environment.get("VLLM_PLUGINS")),
        # The plugin's hooks know the V1 model runner; with Triton vLLM would take the other one.
        "VLLM_USE_V2_MODEL_RUNNER": environment.get("VLLM_USE_V2_MODEL_RUNNER", "0"),
        "REDRAFT_REGISTRY": _absolute(cfg.registry),
        "REDRAFT_TOKEN_FILE": _absolute(cfg.token_file),
        "REDRAFT_ALLOW_REMOTE": "1" if cfg.allow_remote else None,
    }
    if capture.is_on:
        variables |= {
            "REDRAFT_CAPTURE_SPOOL": _absolute(capture.spool),
            "REDRAFT_CAPTURE_INGEST": capture.ingest or None,
            "REDRAFT_NATS_FLEET": capture.nats.fleet,
            "REDRAFT_NATS_CREDENTIALS": _absolute(capture.nats.credentials),
            "REDRAFT_NATS_CA": _absolute(capture.nats.ca),
            "REDRAFT_NATS_CERTIFICATE": _absolute(capture.nats.certificate),
            "REDRAFT_CAPTURE_FRACTION": str(capture.fraction),
            "REDRAFT_CAPTURE_TENANTS": ",".join(capture.tenants),
            "REDRAFT_CAPTURE_TOP_K": str(capture.top_k),
            "REDRAFT_CAPTURE_SPOOL_BYTES": str(capture.spool_bytes),
            "REDRAFT_CAPTURE_HIDDEN_STATES": "1" if capture.hidden_states else "0",
        }
    return {name: value for name, value in variables.items() if value is not None}


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None


def _with_plugin(allowed: str | None) -> str:
    """VLLM_PLUGINS with redraft in it. Unset it allows all plugins, so they have to be named to stay allowed."""
    if allowed is None:
        names = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    else:
        names = {name for name in allowed.split(",") if name}
    return ",".join(sorted(names | {PLUGIN_NAME}))


def _draft(cfg: Config) -> str:
    if cfg.draft is not None:
        return cfg.draft
    if cfg.registry is None:
        raise ValueError("no draft: give --draft, or --registry to serve its current version")
    current = cfg.registry / "current"
    if not current.is_dir():
        raise FileNotFoundError(f"{cfg.registry} has no current version: give --draft, or publish one first")
    return str(current.resolve())


def _method(draft: str) -> Method:
    """How vLLM runs a draft with this configuration: a plain language model unless it says otherwise.

    Raises: ValueError where vLLM has no way to.
    """
    path = Path(draft) / "config.json"
    if not path.is_file():  # a hub name: vLLM fetches it later
        return "draft_model"
    config = json.loads(path.read_text())
    if family := config.get("redraft", {}).get("family"):
        from heads.check_families import METHODS  # loads torch, for a head of ours alone

        if family not in METHODS:
            raise ValueError(f"vLLM has no proposer for {draft}, a draft of the family {family}")
        return cast(Method, METHODS[family])
    names = " ".join([*config.get("architectures", []), config.get("model_type", "")]).lower()
    methods: tuple[Method, ...] = ("eagle3", "eagle", "medusa", "mtp")
    return next((method for method in methods if method in names), "draft_model")


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
