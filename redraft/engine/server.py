"""A vLLM server for measurements, started and stopped by this process.

This module imports neither torch nor vLLM.
"""

import contextlib
import functools
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from packaging.version import Version

from redraft.engine import adaptive
from redraft.engine import wait as engine_wait
from redraft.engine.command import vllm_command
from redraft.engine.engine_log import why_ended
from redraft.engine.hooks import find_unsupported
from redraft.engine.lookups import lookup_env, vllm_part
from redraft.engine.machine import ENGINE_IS_CPU, VLLM_VERSION
from redraft.engine.process import free_port, process_group
from redraft.engine.settings import read_settings
from redraft.engine.target_dtype import default_target_dtype
from redraft.files.folder import CONFIG, model_folder, read_config
from redraft.files.progress import Progress
from redraft.files.settings import merge
from redraft.files.windows import View, is_mixed, served_views
from redraft.heads.catalog import find_speculative
from redraft.heads.families.retrieval import FOLDER, LIVE, MEASURE_COUNTED, require_answers

START_TIMEOUT_S = 1800
"""Maximum time for a server to become healthy, in seconds. vLLM allows an engine 600 s, which is
too short for a large target on network storage, or for compilation on a busy machine. If the engine
exits, the wait ends at once.
"""

# `compiled` is vLLM's default. `eager` starts in a third of the time.
Mode = Literal["compiled", "eager"]

EAGER = "--enforce-eager"  # vLLM's argument for eager mode
DROPS_A_BLOCK = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Methods for which vLLM by default reuses one block fewer from the prefix cache than it finds."""

IDLE_S = 1.2  # a vLLM worker spins for 1 s after the last step, so wait before measuring


@dataclass(frozen=True, kw_only=True)
class VllmServer:
    url: str
    model: str
    dtype: str
    num_speculative_tokens: int
    """Number of draft tokens per step. 0 if nothing is drafted."""
    mode: Mode = "compiled"


@contextlib.contextmanager
def vllm_server(
    model: str | Path,
    *,
    log: Path,
    speculative_config: Mapping[str, Any] | None = None,
    max_model_len: int = 1024,
    max_num_seqs: int = 16,
    vllm_defaults: bool = False,
    dtype: str | None = None,
    mode: Mode | None = None,
    kv_cache_bytes: int = 256 << 20,
    cpu_cores: str | None = None,
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[VllmServer]:
    """Run a vLLM server on a free loopback port: healthy on entry, always stopped on exit.

    The default is the training dtype (`default_target_dtype`). The default mode is vLLM's own on a
    GPU, and eager on a CPU, where compilation takes a minute. Callers that measure speed choose a
    mode explicitly (`serving.baseline`). `cpu_cores` ("0-3") assigns cores, so that two servers on
    one machine do not share them; by default, vLLM places both at core 0. Setting `given_up` ends
    the wait for a healthy server.

    Raises:
        ChildProcessError: the engine exited, with the engine's message, or the wait was aborted.
        TimeoutError: the server did not become healthy.
        ValueError: vLLM would not serve this draft with this config (`require_servable`).
    """
    require_servable(speculative_config, {**os.environ, **(extra_env or {})})
    port = free_port()
    dtype = dtype or engine_dtype(model)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    if vllm_defaults:
        arguments += ["--max-model-len", "auto"]
    else:
        arguments += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
        arguments += ["--no-enable-prefix-caching"]
    mode = mode or ("eager" if ENGINE_IS_CPU else "compiled")
    if mode == "eager":
        arguments += [EAGER]
    if ENGINE_IS_CPU:
        arguments += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    if speculative_config is not None:
        arguments += ["--speculative-config", json.dumps(vllm_keys(speculative_config))]
        arguments += ["--per-request-spec-decode-metrics", "detailed"]
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        **allow_slow_start(os.environ),
        **(extra_env or {}),
    }
    asked = merge(engine_wait.ENABLED, read_settings({**os.environ, **env}))
    env |= lookup_env(speculative_config, asked)
    if (speculative_config or {}).get(adaptive.KEY):  # only the plugin counts the verified tokens
        plugins = [*os.environ.get("VLLM_PLUGINS", "").split(","), "redraft"]
        env["VLLM_PLUGINS"] = ",".join(dict.fromkeys(filter(None, plugins)))
    if cpu_cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = cpu_cores
    # The caller's arguments come last, so they override those above.
    with process_group(vllm_command(model, [*arguments, *extra_args]), log=log, env=env) as process:
        server = VllmServer(
            url=f"http://127.0.0.1:{port}",
            model=str(model),
            dtype=dtype,
            num_speculative_tokens=int((speculative_config or {}).get("num_speculative_tokens", 0)),
            mode="eager" if EAGER in (*arguments, *extra_args) else "compiled",
        )
        wait_until_healthy(server.url, process, log, given_up=given_up)
        yield server


def allow_slow_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's variable that limits the start of an engine: as given, or `START_TIMEOUT_S`."""
    name = "VLLM_ENGINE_READY_TIMEOUT_S"
    return {name: environment.get(name, str(START_TIMEOUT_S))}


def engine_dtype(model: str | Path) -> str:
    """Return the value of vLLM's --dtype for a target, which matches training.

    `default_target_dtype` chooses it.
    """
    return default_target_dtype(model, on_cpu=ENGINE_IS_CPU) or "auto"


def vllm_keys(
    speculative_config: Mapping[str, Any], version: str | None = VLLM_VERSION
) -> dict[str, Any]:
    """Return the --speculative-config for vLLM, without redraft's keys and with two faster options.

    A greedy head with a smaller vocabulary chooses its token within that vocabulary. By default,
    vLLM first copies the logits to a row over the target's vocabulary. This gives the same token,
    but takes 0.24 ms instead of 0.04 ms with 8,192 of 49,152 tokens on a CPU.

    The last cached block of a prompt is read from the prefix cache. By default, vLLM recomputes
    this block (128 tokens on a CPU) when it serves a head. In an EAGLE or MTP layer, the key of the
    block's last token was computed with the token that followed it in the earlier request. This
    affects a single entry of the KV cache, and does not change any answer. DFlash and DSpark have
    no such key. From vLLM 0.33 on, a block is also looked up by the token after it, so the key is
    right and nothing is recomputed. There, vLLM's default is kept.
    """
    config = vllm_part(speculative_config)
    family = find_speculative(config)
    is_greedy = config.get("draft_sample_method", "greedy") == "greedy"
    # Adaptive verification needs the whole row, and vLLM refuses to combine it with this option.
    if family is not None and family.chooses_locally and is_greedy and not config.get(adaptive.KEY):
        config.setdefault("use_local_argmax_reduction", True)
    if config.get("method") in DROPS_A_BLOCK and not hashes_ahead(version):
        config.setdefault("disable_eagle_block_drop", True)
    return config


def hashes_ahead(version: str | None) -> bool:
    """Whether the hash of a cached block includes the token after the block."""
    return version is not None and Version(version).release[:2] >= (0, 33)


def describe_hits(
    method: str | None, version: str | None = VLLM_VERSION, *, on_cpu: bool = ENGINE_IS_CPU
) -> str:
    """Describe how many cached tokens a draft with this method loses."""
    if method not in DROPS_A_BLOCK:
        return "with this draft, all cached blocks of a prompt are reused"
    block = f"{128 if on_cpu else 16} tokens by default"
    if hashes_ahead(version):
        return (
            f"with this draft, all cached blocks of a prompt are reused; with a KV connector, all but "
            f"the last one ({block})"
        )
    return (
        f"with this draft, all cached blocks of a prompt are reused as redraft serves it; with "
        f"vLLM alone, all but the last one ({block})"
    )


def forget_requests(speculative_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without state from earlier requests, so that prompts can be measured again.

    Raises:
        ValueError: the config has live counts, which draft from earlier requests.
    """
    if speculative_config.get(FOLDER) == LIVE:
        raise ValueError(f"{LIVE} would draft from answers to repeated prompts: {MEASURE_COUNTED}")
    if speculative_config.get("method") != "suffix":
        return dict(speculative_config)
    return {**speculative_config, "suffix_decoding_max_cached_requests": 0}


def require_servable(
    speculative_config: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Refuse a draft that vLLM would refuse, and more tokens than the draft can propose.

    vLLM would fill the excess tokens with arbitrary values. The runner and config.json are checked
    before a server starts. For a draft that has not been downloaded yet, the number of tokens is
    not checked.

    Raises:
        ValueError: the draft cannot be served, or too many tokens are requested.
    """
    require_runner(speculative_config, environment)
    config = speculative_config or {}
    if config.get(FOLDER, LIVE) != LIVE:
        require_answers(Path(config[FOLDER]))
    family, asked = find_speculative(config), config.get("num_speculative_tokens")
    if family is None or asked is None:
        return
    most = family.max_tokens(_read_draft(config))
    if most is not None and asked > most:
        raise ValueError(
            f"{asked} draft tokens requested from {config['model']}, a {family.title} draft that "
            f"proposes {most}: set --num-speculative-tokens to at most {most}"
        )


def _read_draft(speculative_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the draft's config.json; empty if it has no folder or has not been downloaded yet."""
    if "model" not in speculative_config:
        return {}
    try:
        folder = model_folder(speculative_config["model"], speculative_config.get("revision"))
    except FileNotFoundError:
        return {}
    return read_config(folder) if (folder / CONFIG).is_file() else {}


def require_runner(
    speculative_config: Mapping[str, Any] | None,
    environment: Mapping[str, str] = os.environ,
    *,
    views: Sequence[View] | None = None,
    way_out: str = "",
    on_cpu: bool = ENGINE_IS_CPU,
    version: str | None = VLLM_VERSION,
) -> None:
    """Refuse an unsupported vLLM, and a draft that vLLM or its model runner cannot serve.

    `views` describe the windows of the draft's layers. By default, they are read from its folder.

    Raises:
        ValueError: this vLLM or its model runner is not supported.
    """
    if error := find_unsupported(version):
        raise ValueError(error)
    family = find_speculative(speculative_config or {})
    if family is None:
        return
    # Compared as (0, 33) > (0, 32), so patch releases count as the same version.
    if (
        family.last_vllm
        and version
        and Version(version).release[:2] > Version(family.last_vllm).release
    ):
        raise ValueError(
            f"vLLM {version} no longer serves {family.title}: install vLLM {family.last_vllm}, "
            f"or train a different draft"
        )
    title, decoders = family.title, family.decoders
    if views is None:
        served = _read_draft(speculative_config or {}) if family.layers_key else {}
        views = served_views(served, "the draft") if served else ()
    if is_mixed(views):
        # V1 has a single group of caches for all layers of a draft.
        title, decoders = f"{title} with and without windows", tuple({*decoders} & {"v2"})
        if not decoders:
            raise ValueError(
                f"no model runner of vLLM serves {title}: use the window in all layers (without "
                f"--head.full-layers) or in none{way_out}"
            )
    asked = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is None:
        # If the variable is not set, vLLM uses V1 for a draft that V2 does not serve.
        if "v1" in decoders or not on_cpu:
            return
        needed, reason = (
            "V2",
            "vLLM on a CPU uses V1, because it has no Triton there: serve it on a GPU",
        )
    else:
        taken, needed = ("V1", "V2") if asked == "0" else ("V2", "V1")
        if taken.lower() in decoders:
            return
        reason = f"VLLM_USE_V2_MODEL_RUNNER={asked} selects {taken}: unset it"
    raise ValueError(f"only vLLM's {needed} model runner serves {title}, but {reason}{way_out}")


def read_runner(log: Path) -> Literal["v1", "v2"]:
    """Return a server's model runner, read from its log. vLLM names only V2 there."""
    return "v2" if "Using V2 Model Runner" in log.read_text(errors="replace") else "v1"


def read_threads(log: Path) -> int | None:
    """Read a server's number of OpenMP threads from its log. None if the log does not state it."""
    if not log.is_file():
        return None
    latest = log.read_text(errors="replace").rpartition("OpenMP thread binding info")[2]
    cores = re.findall(r"core ids=\[([\d, ]*)\]", latest)
    return sum(len(of_rank.split(",")) for of_rank in cores) or None


def find_two_speeds(environment: Mapping[str, str], num_cores: int) -> str:
    """Return a warning if vLLM's CPU build would run at two speeds; otherwise "".

    The engine core's loop needs its own CPU core (`engine.patches`).
    """
    threads = int(environment.get("OMP_NUM_THREADS") or num_cores)
    if (
        environment.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
        or threads < num_cores
        or num_cores == 1
    ):
        return ""
    return (
        f"VLLM_CPU_OMP_THREADS_BIND=nobind lets {threads} threads compete with vLLM's own loop for "
        f"{num_cores} cores, "
        f"and a step may take three times as long: unset it, or set OMP_NUM_THREADS={num_cores - 1}"
    )


@functools.cache
def http_client() -> httpx.Client:
    """Return a client for servers on this machine, which uses no proxy and keeps no connection.

    `httpx.get` makes a new client for each call, which reads all certificates and takes 30 ms of
    CPU time. That is too much for a process that polls every second on an engine's cores.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(trust_env=False, limits=limits)


def wait_until_healthy(
    url: str,
    process: subprocess.Popen[bytes],
    log: Path,
    *,
    name: str = "vLLM",
    given_up: threading.Event | None = None,
) -> None:
    """Wait until `GET {url}/health` succeeds.

    Raises:
        ChildProcessError: the process exited, or was given up.
        TimeoutError: the server did not become healthy in time.
    """
    started = time.monotonic()
    with Progress(
        desc=f"starting {name}", bar_format="{desc}: {elapsed}", leave=False, disable=None
    ) as bar:
        while time.monotonic() - started < START_TIMEOUT_S:
            # If the engine has exited, do not wait until the timeout.
            if process.poll() is not None:
                raise ChildProcessError(
                    f"{name} did not start: {why_ended(process, log)} (whole log: {log})"
                )
            if given_up is not None and given_up.is_set():
                raise ChildProcessError(f"{name} was stopped before it was ready: see {log}")
            with contextlib.suppress(httpx.TransportError):
                if http_client().get(f"{url}/health", timeout=5).is_success:
                    return
            time.sleep(0.25)
            bar.refresh()
    raise TimeoutError(f"{name} was not ready after {START_TIMEOUT_S} s: see {log}")
