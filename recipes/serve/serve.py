"""vLLM's OpenAI server with the plugin switched on: `redraft serve TARGET --draft D -- any vLLM argument`.

    $ redraft serve meta-llama/Llama-3.1-8B-Instruct --registry drafts/llama8b --capture.spool spool -- --port 8001

Everything after `--` goes to vLLM unchanged. The plugin reads settings from environment variables (REDRAFT_...), which
this command sets. A deployment that starts vLLM itself sets VLLM_PLUGINS=redraft and those variables instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from redraft.eval.engine.command import vllm_command
from redraft.eval.engine.lookup_first import HeadLimits, mix
from redraft.eval.engine.lookups import lookup_env
from redraft.eval.engine.server import engine_dtype, engine_is_cpu, require_servable, vllm_keys
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.catalog import FAMILIES, Method, find_family, list_methods
from redraft.heads.doctor.method import lacks_confidence
from redraft.heads.doctor.pair import read_provenance
from redraft.heads.families.retrieval import BEFORE_HEAD, Retrieval, is_retrieval
from redraft.heads.family import Family
from redraft.heads.files.folder import is_hub_name, tensor_files
from redraft.heads.files.folder import read_config as read_model_config
from redraft.online.engine.config import PLUGIN_NAME, CaptureConfig, SwapConfig, read_config
from redraft.recipes.cli import run_recipe

PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
"""vLLM's variable with prefixes of those that Ray workers get; workers on other machines inherit none."""


HEAD_FLAGS = (
    *("ngrams", "answers", "least_first", "head_tokens", "head_requests"),
    *("method", "draft_sample_method", "draft_quantization", "adaptive_verification"),
)
"""Options without a meaning for counted answers alone."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the target."""
    vllm_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further arguments of vLLM's server, after `--`."""
    draft: str | None = None
    """Folder or hub name of the draft. By default the current version of the registry."""
    registry: Path | None = None
    """Folder of the draft's versions (v000001, ..., current). Required for swapping."""
    num_speculative_tokens: int = 3
    """Draft tokens per step."""
    method: Method | None = None
    """vLLM's method for the draft. By default it follows from the draft's config.json."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How draft tokens are chosen. With `greedy` the acceptance is p(argmax q); with `probabilistic` it is
    sum min(p, q), which is higher at temperatures above 0."""
    draft_quantization: str | None = None
    """Quantisation of the draft when it is loaded, as vLLM calls it (`fp8`); of every version that is swapped in, too.
    The registry holds plain weights."""
    ngrams: bool = False
    """Look the last 2 to 4 tokens up in the text first, and ask the draft only if they did not occur before. For
    EAGLE-1, EAGLE-3 and MTP, with greedy drafts; vLLM then takes the V1 model runner."""
    answers: Path | None = None
    """Folder of `redraft retrieval`: look the tokens up in the text and in the target's answers first, and ask the
    draft only if nothing probable is found. For the same drafts as --ngrams."""
    head_tokens: int | None = None
    """With --ngrams or --answers: most tokens that the draft itself proposes per step. By default
    --num-speculative-tokens."""
    head_requests: int | None = None
    """With --ngrams or --answers: if more requests than this are answered at once, only tokens looked up are
    proposed."""
    verify_cost: float | None = None
    """For counted answers: cost of verifying one more token, in target steps of one request. A token is proposed if its
    probability is at least this times the requests in the step. By default as `redraft retrieval` was told."""
    least_first: float | None = None
    """With --answers: least probability of the first token looked up. If it is lower, the draft is asked. By default
    0.5."""
    adaptive_verification: bool = False
    """Verify fewer draft tokens where the draft is unsure, the more so the busier the server is. Only for a DSpark head
    with a confidence head; nothing is captured then."""
    token_file: Path | None = None
    """File with the bearer token that protects /redraft/... The variable REDRAFT_TOKEN can hold the token instead."""
    allow_remote: bool = False
    """Allow other machines to use /redraft/... as well."""
    swap: SwapConfig = field(default_factory=SwapConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)


def main(cfg: Config) -> None:
    environment = os.environ | plugin_environment(cfg, os.environ)
    read_config(environment)  # report a wrong setting now, not after vLLM has loaded for minutes
    command = server_command(cfg)
    # exec, not a child process: signals of systemd or Kubernetes reach vLLM directly.
    os.execve(command[0], command, environment | lookup_env(speculative_config(cfg)))


def server_command(cfg: Config) -> list[str]:
    """The command line of vLLM's server.

    Raises:
        ValueError: if neither a draft nor a registry is given, or vLLM would not serve the draft so.
        FileNotFoundError: if the registry has no current version.
    """
    draft = ["--speculative-config", json.dumps(vllm_keys(speculative_config(cfg)))]
    arguments = [*draft, *template_arguments(Path(_draft(cfg)))]
    # Before the user's arguments, which win.
    return vllm_command(cfg.target, ["--dtype", engine_dtype(cfg.target), *arguments, *cfg.vllm_args])


def template_arguments(draft: Path) -> list[str]:
    """vLLM's arguments for the chat template of a draft's training, e.g. to answer without reasoning."""
    found = (read_provenance(draft) or {}).get("template_arguments")
    return ["--default-chat-template-kwargs", json.dumps(found)] if found else []


def speculative_config(cfg: Config) -> dict[str, Any]:
    """The draft and how it is served. Raises ValueError, FileNotFoundError as `server_command`."""
    draft = _draft(cfg)
    if is_retrieval(draft):
        if changed := [name for name in HEAD_FLAGS if getattr(cfg, name) != getattr(Config, name)]:
            raise ValueError(f"--{changed[0].replace('_', '-')} is for a model, and {draft} holds counted answers")
        config = Retrieval.speculative_config(Path(draft), verify_cost=cfg.verify_cost)
        return {**config, "num_speculative_tokens": cfg.num_speculative_tokens}
    if cfg.verify_cost is not None and cfg.answers is None:
        raise ValueError(f"--verify-cost is for counted answers (`redraft retrieval`), which {draft} is not")
    speculative: dict[str, Any] = {
        "model": draft,
        **({"method": cfg.method} if cfg.method else _choose_proposer(draft)),
        "num_speculative_tokens": cfg.num_speculative_tokens,
        "draft_sample_method": cfg.draft_sample_method,
    }
    if cfg.draft_quantization:
        speculative["quantization"] = cfg.draft_quantization
    require_servable(speculative)
    if cfg.adaptive_verification:
        _require_confidence(draft)
        speculative["enable_adaptive_verification"] = True
    limits = HeadLimits(tokens=cfg.head_tokens, requests=cfg.head_requests)
    if lookup := _lookup(cfg):
        return mix(lookup, speculative, limits)
    # Limits would be ignored without a lookup. A flag without effect is an error.
    if limits != HeadLimits():
        raise ValueError(
            "--head-tokens and --head-requests limit the draft when a lookup comes first: add --ngrams or --answers"
        )
    return speculative


def _lookup(cfg: Config) -> dict[str, Any] | None:
    """vLLM's config of the lookup before the draft; None without one. Raises ValueError for flags that exclude each
    other, or if --answers is no folder of counted answers."""
    if cfg.answers is None:
        if cfg.least_first is not None:
            raise ValueError("--least-first is about the tokens looked up in --answers: add --answers")
        return Ngram().speculative_config if cfg.ngrams else None
    if cfg.ngrams:
        raise ValueError("--answers also looks tokens up in the text: leave out --ngrams")
    if not is_retrieval(cfg.answers):
        raise ValueError(f"--answers {cfg.answers} holds no counted answers: `redraft retrieval` writes such a folder")
    least = BEFORE_HEAD if cfg.least_first is None else cfg.least_first
    return Retrieval.speculative_config(cfg.answers, verify_cost=cfg.verify_cost, least_first=least)


def plugin_environment(cfg: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that switch the plugin on, to be added to `environment`."""
    capture = cfg.capture
    variables = {
        "VLLM_PLUGINS": _with_plugin(environment.get("VLLM_PLUGINS")),
        RAY_PREFIXES: _with_prefix(environment.get(RAY_PREFIXES, "")),
        "REDRAFT_REGISTRY": _absolute(cfg.registry),
        "REDRAFT_TOKEN_FILE": _absolute(cfg.token_file),
        "REDRAFT_ALLOW_REMOTE": "1" if cfg.allow_remote else None,
        "REDRAFT_SWAP_CACHE": cfg.swap.cache,
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
            "REDRAFT_CAPTURE_HIDDEN_FORMAT": capture.hidden_format,
        }
    # None: a variable of the user's environment stays in force.
    return {name: value for name, value in variables.items() if value is not None}


def sampling_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a server can sample beside a draft, to be added to `environment`.

    Without the plugin's fix, vLLM's CPU build accepts draft tokens above temperature 0 at random, or ends. With these
    variables the plugin does nothing else. Other builds need none.
    """
    return plugin_environment(Config(target=""), environment) if engine_is_cpu() else {}


def _absolute(path: Path | None) -> str | None:
    return str(path.absolute()) if path else None


def _with_plugin(allowed: str | None) -> str:
    """VLLM_PLUGINS with redraft added. If it is unset, all plugins are allowed: they must be named to stay so."""
    if allowed is None:
        names = {entry.name for group in PLUGIN_GROUPS for entry in entry_points(group=group)}
    else:
        names = {name for name in allowed.split(",") if name}
    return ",".join(sorted(names | {PLUGIN_NAME}))


def _with_prefix(prefixes: str) -> str:
    """RAY_PREFIXES with that of the plugin's variables added."""
    names = [name for name in map(str.strip, prefixes.split(",")) if name]
    return ",".join(dict.fromkeys([*names, "REDRAFT_"]))


def _draft(cfg: Config) -> str:
    if cfg.draft is not None:
        if not is_hub_name(cfg.draft) and not Path(cfg.draft).is_dir():
            raise FileNotFoundError(
                f"there is no draft folder {cfg.draft}, and it is not a hub name (owner/name) either"
            )
        return cfg.draft
    if cfg.registry is None:
        raise ValueError("no draft: give --draft, or --registry to serve its current version")
    current = cfg.registry / "current"
    if not current.is_dir():
        raise FileNotFoundError(f"{cfg.registry} has no current version: give --draft, or publish one first")
    # Resolved: the server names a draft by the folder, and the link may move on while vLLM loads.
    return str(current.resolve())


def _require_confidence(draft: str) -> None:
    """Raise ValueError if the draft has no confidence head. A hub name is not read: vLLM fetches it later."""
    if is_hub_name(draft):
        return
    folder = Path(draft)
    if problem := lacks_confidence(read_model_config(folder), tensor_files(folder)):
        raise ValueError(f"--adaptive-verification {problem}: {draft}")


def _choose_proposer(draft: str) -> dict[str, Any]:
    """vLLM's method for a draft, and the flags beside it, by its config.json.

    A plain language model, or an unread hub name, is `draft_model`.

    Raises:
        ValueError: vLLM has no proposer for its family.
    """
    # The order: redraft's section of config.json, then an architecture of one family only, then any method's
    # name inside the architecture or model type.
    path = Path(draft) / "config.json"
    if not path.is_file():  # a hub name: vLLM fetches it later
        return {"method": "draft_model"}
    config = json.loads(path.read_text())
    if family := _find_family(config):
        if not family.speculative:
            raise ValueError(f"vLLM has no proposer for {draft}, a draft of the family {family.name}")
        return family.speculative
    names = " ".join([*config.get("architectures", []), config.get("model_type", "")]).lower()
    methods = sorted(list_methods(), key=len, reverse=True)  # longest first: eagle is a part of eagle3
    return {"method": next((method for method in methods if method in names), "draft_model")}


def _find_family(config: Mapping[str, Any]) -> Family | None:
    """The family that config.json names, as redraft or as an architecture of that family only."""
    if name := config.get("redraft", {}).get("family"):
        return find_family(name)
    named = set(config.get("architectures") or ())
    return next((family for family in FAMILIES if named.intersection(family.architectures)), None)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
