"""vLLM flags that conflict with a draft, a target or recording.

They are checked before the server starts.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redraft.engine import adaptive
from redraft.engine.counters import EMBEDS_BESIDE_DRAFT, LOG_STATS_OFF
from redraft.engine.proxies import is_local
from redraft.files.folder import model_folder, read_generation_config
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.pair import Pair

DEV_MODE, RUST_FRONTEND = "VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND"
MODELSCOPE, REDIRECT = "VLLM_USE_MODELSCOPE", "VLLM_MODEL_REDIRECT_PATH"

ALIASES = {
    "sc": "speculative_config", "dp": "data_parallel_size", "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size", "n": "nnodes", "asc": "api_server_count",
    "cc": "compilation_config", "O": "optimization_level",
}  # fmt: skip

Beside = Literal["redraft", "model", "head", "lookup", "records", "pace", "up"]
"""The part of redraft that a flag conflicts with. `redraft` means any server that redraft starts.
Heads and standalone drafts are models too. `pace` means that redraft chooses the number of draft
tokens.
"""


def is_on(value: str) -> bool:
    """Whether a flag with this value has an effect. A switch has an empty value."""
    return value.lower() not in ("0", "false", "none", "off")


def is_many(value: str) -> bool:
    return value != "1"


@dataclass(frozen=True, kw_only=True)
class Clash:
    """A flag of `vllm serve` that does not work the same way with a draft."""

    flag: str
    reason: str
    way_out: str = "remove the flag"
    beside: Beside = "redraft"
    counts: Callable[[str], bool] = is_on
    """Function that returns whether this flag value conflicts."""
    only_warns: bool = False

    @property
    def line(self) -> str:
        # Two reasons are separate constants, because the plugin also reports them.
        name = f"--{self.flag.replace('_', '-')}"
        return (
            self.reason if self.reason.startswith(name) else f"{name} {self.reason}: {self.way_out}"
        )


CLASHES = (
    Clash(flag="model", reason="names the target, which is the first argument of redraft"),
    Clash(flag="model_weights", reason="names the target, which is the first argument of redraft"),
    Clash(
        flag="speculative_config",
        reason="would replace the draft",
        way_out="set --draft and its options before the --",
    ),
    Clash(
        flag="spec_method", reason="would replace the draft", way_out="set --draft before the --"
    ),
    Clash(flag="spec_model", reason="would replace the draft", way_out="set --draft before the --"),
    Clash(
        flag="spec_tokens",
        reason="would replace the number of draft tokens",
        way_out="set --num-speculative-tokens before the --",
    ),
    # redraft starts vLLM's Python API server in one process, whose middleware reads tenants and
    # opt-outs. That server accepts the following flags of `vllm serve` but ignores them.
    Clash(
        flag="headless",
        reason="works only with `vllm serve`, but redraft starts one API server with its engine",
        way_out="on several machines use --distributed-executor-backend ray",
    ),
    Clash(
        flag="grpc",
        reason="would bypass the routes and headers of the HTTP server, so nothing could be recorded "
        "or swapped",
        way_out="serve HTTP",
    ),
    Clash(
        flag="data_parallel_multi_port_external_lb",
        reason="starts one server per replica, but redraft starts a single server",
        way_out="run redraft serve or redraft up --join once per replica",
    ),
    Clash(
        flag="api_server_count",
        reason="has no effect, because redraft starts one API server",
        counts=is_many,
        only_warns=True,
    ),
    Clash(
        flag="logits_processors",
        reason="is refused by vLLM when it uses a draft",
        way_out="serve such requests without a draft (vllm serve)",
    ),
    Clash(
        flag="runner",
        reason="selects a model that generates no tokens, so there is nothing to draft",
        way_out="serve it without redraft (vllm serve)",
        counts=lambda value: value == "pooling",
    ),
    Clash(
        flag="convert",
        reason="makes a model that generates no tokens, so there is nothing to draft",
        way_out="serve it without redraft (vllm serve)",
        counts=lambda value: value not in ("auto", "none"),
    ),
    Clash(
        flag="watermark_config",
        reason="marks sampled tokens, and vLLM refuses it with a draft whose tokens are not sampled",
        way_out="use redraft serve --draft-sample-method probabilistic with an EAGLE, MTP or DSpark "
        "head",
        beside="up",
    ),
    Clash(
        flag="enable_lora",
        reason="serves all adapters with one draft, which learns only from requests without an adapter",
        way_out="if an adapter has much traffic, give it its own server and a learner with draft.adapter",
        only_warns=True,
    ),
    Clash(
        flag="enable_trace_replay",
        reason="has no effect, because vLLM refuses trace_decode_token_ids when it uses a draft",
        way_out="replay on a server without a draft (vllm serve)",
        only_warns=True,
    ),
    Clash(flag="enable_prompt_embeds", reason=EMBEDS_BESIDE_DRAFT, beside="model"),
    Clash(
        flag="kv_sharing_fast_prefill",
        reason="is refused by vLLM with a head, which reads the states of all prompt tokens",
        beside="head",
    ),
    Clash(
        flag="async_scheduling",
        reason="is refused by vLLM with n-grams and suffix decoding, which need each token before the "
        "next step",
        beside="lookup",
    ),
    Clash(
        flag="load_format",
        reason="dummy serves random weights, but records would be attributed to the target",
        beside="records",
        counts=lambda value: value == "dummy",
    ),
    Clash(
        flag="data_parallel_size",
        reason="above 1 creates replicas, which cannot choose the number of draft tokens",
        way_out="start a server for each replica (redraft up: --join), or use redraft serve with "
        "--pace off",
        beside="pace",
        counts=is_many,
    ),
    Clash(
        flag="pipeline_parallel_size",
        reason="above 1 computes several batches at once, and a batch would use the number of draft "
        "tokens chosen for another",
        way_out="use --tensor-parallel-size, or redraft serve with --pace off",
        beside="pace",
        counts=is_many,
    ),
    Clash(
        flag="nnodes",
        reason="above 1 needs a headless server on the other machines, which redraft up does not start",
        way_out="use --distributed-executor-backend ray",
        beside="up",
        counts=is_many,
    ),
    Clash(
        flag="revision",
        reason="has no effect, because redraft up serves the main branch of a hub name from its folder",
        way_out="run `hf download NAME --revision REVISION --local-dir FOLDER`, and give FOLDER",
        beside="up",
    ),
    Clash(
        flag="uds",
        reason="serves on a Unix socket, but the learner connects over TCP",
        way_out="use --host and --port",
        beside="up",
    ),
    Clash(
        flag="ssl_keyfile",
        reason="serves HTTPS, but redraft up's learner connects over HTTP on this machine",
        way_out="terminate TLS in a proxy in front of the server",
        beside="up",
    ),
    Clash(
        flag="ssl_certfile",
        reason="serves HTTPS, but redraft up's learner connects over HTTP on this machine",
        way_out="terminate TLS in a proxy in front of the server",
        beside="up",
    ),
    Clash(flag="disable_log_stats", reason="disables the status line's counters", beside="up"),
    Clash(flag="disable_log_stats", reason=LOG_STATS_OFF, only_warns=True),
    Clash(
        flag="uds",
        reason="serves on a Unix socket, but the learner connects over TCP",
        way_out="use --host and --port if a learner is to train the draft",
        only_warns=True,
    ),
    Clash(
        flag="ssl_cert_reqs",
        reason="asks clients for a certificate, which the learner does not have",
        only_warns=True,
    ),
)
"""The flags of `vllm serve` that redraft refuses or warns about. All others work as in `vllm
serve`.
"""

REFUSED_FIELDS = ("min_p", "logit_bias")
"""Request fields that vLLM rejects with status 400 when it uses a draft."""

BESIDE_A_DRAFT = (
    f"vLLM refuses requests with {' or '.join(REFUSED_FIELDS)} when it uses a draft (400): send these "
    "to a server without a draft"
)

LOOKUP_WAITS = "a lookup needs each token before vLLM schedules the next step, so asynchronous scheduling is off"
ON_THE_GPU = ": add --async-scheduling after the -- to look counted answers up on the GPU (no GPU has run this)"
SHARED_COUNTS = (
    "clients that set no X-Redraft-Tenant, cache_salt or LoRA adapter share live counts, so one of "
    "them can infer another's answers from the sizes of streamed events"
)
SHARED_BY_TENANTS = (
    "all tenants share live counts (--live.shared), so one of them can infer another's answers from "
    "the sizes of streamed events"
)

READ = (
    *ALIASES.values(),
    *dict.fromkeys(clash.flag for clash in CLASHES),
    *("config", "generation_config", "gpu_memory_utilization", "host"),
    *("port", "served_model_name"),
    *adaptive.READ,
    "watermark",  # whose name begins another's
)
"""All flags that `redraft serve` and `redraft up` read."""


def read_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of vLLM's arguments, by name with underscores.

    They include those from a `--config` file, which the other arguments override.

    Raises:
        ValueError, OSError: the file cannot be read.
    """
    flags: dict[str, str] = {}
    name = ""
    for argument in arguments:
        is_name = argument.startswith("-") and not argument[1:2].isdigit() and argument != "-"
        if is_name:
            # --hf-overrides.key sets a part of a dictionary
            name, _, value = argument.lstrip("-").partition("=")
            name = _find_name(
                name.partition(".")[0], ALIASES if not argument.startswith("--") else READ
            )
            flags[name] = value
        elif name:
            flags[name] = argument
    return _read_file(Path(flags["config"])) | flags if flags.get("config") else flags


def _read_file(path: Path) -> dict[str, str]:
    import yaml  # imported here, because only such a file needs it

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} contains no vLLM settings: its lines must have the form `port: 8001`"
        )
    # `key: false` leaves a switch out.
    return {
        _find_name(str(key), READ): str(value)
        for key, value in content.items()
        if value is not False
    }


def _find_name(given: str, known: Collection[str]) -> str:
    """Return the full name of a flag.

    vLLM accepts an abbreviated name if only one flag begins with it.
    """
    name = given.replace("-", "_")
    found = [whole for whole in known if whole == name] or [
        whole for whole in known if whole.startswith(name)
    ]
    return ALIASES.get(found[0], found[0]) if len({*found}) == 1 else name


def require_agreement(
    arguments: Sequence[str], flags: Mapping[str, str], target: str, parts: Collection[Beside]
) -> None:
    """Raise ValueError for vLLM arguments that do not work with these parts of redraft."""
    if arguments and not arguments[0].startswith("-"):
        raise ValueError(
            f"{arguments[0]} is not a flag for vLLM: the target is redraft's first argument, and "
            "vLLM's flags come after --"
        )
    for clash in _find_clashes(flags, parts):
        if not clash.only_warns:
            raise ValueError(clash.line)
    chooses = any("min_p" in argument for argument in arguments)
    if not chooses and (min_p := _default_min_p(flags, target)) > 0:
        raise ValueError(
            f"by default, {target} samples with min_p {min_p:g}, but vLLM refuses requests with min_p "
            "when it uses a draft: add --override-generation-config.min_p 0 after the --"
        )


def _find_clashes(flags: Mapping[str, str], parts: Collection[Beside]) -> Iterator[Clash]:
    for clash in CLASHES:
        value = flags.get(clash.flag)
        if value is not None and clash.beside in ("redraft", *parts) and clash.counts(value):
            yield clash


def _default_min_p(flags: Mapping[str, str], target: str) -> float:
    """Return the default min_p of a request, which vLLM reads from generation_config.json."""
    if flags.get("generation_config", "auto") != "auto":
        return 0.0
    try:
        folder = model_folder(target, flags.get("revision"))
        return float(read_generation_config(folder).get("min_p") or 0)
    except (OSError, ValueError):  # vLLM will download the file, or report the error
        return 0.0


def require_private(flags: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Refuse vLLM's development mode if other machines can reach the server.

    Its routes replace weights without a token.

    Raises:
        ValueError: the mode is on, and other machines can reach the server.
    """
    if environment.get(DEV_MODE, "0") == "0" or "uds" in flags or is_local(flags.get("host", "")):
        return
    raise ValueError(
        f"{DEV_MODE}=1 allows anyone who can reach the server to replace the weights: add --host 127.0.0.1 "
        "after the --, or unset it and load weights with POST /redraft/target"
    )


def require_same_weights(target: str, environment: Mapping[str, str]) -> None:
    """Refuse variables with which vLLM could load weights other than the target's.

    Raises:
        ValueError: such a variable is set.
    """
    if is_on(environment.get(MODELSCOPE, "0")) and not Path(target).exists():
        raise ValueError(
            f"{MODELSCOPE} makes vLLM load {target} from ModelScope, but redraft reads the Hugging Face "
            "hub: download the target yourself, and give its folder"
        )
    if environment.get(REDIRECT):
        raise ValueError(
            f"{REDIRECT} may make vLLM load weights other than those of {target}: unset it, and give "
            f"the folder "
            "with the weights"
        )


def list_warnings(
    flags: Mapping[str, str],
    target: str,
    draft: Path | None,
    speculative: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
) -> Iterator[str]:
    """Yield lines about flags, variables and drafts that are probably mistakes."""
    if is_on(environment.get(RUST_FRONTEND, "0")):
        yield (
            f"{RUST_FRONTEND} has no effect, because redraft starts the Python API server, whose "
            "middleware reads tenants and opt-outs: unset it"
        )
    yield from (clash.line for clash in _find_clashes(flags, ()) if clash.only_warns)
    if draft is None:
        return
    from redraft.heads.doctor.checks import static_findings  # loads torch

    try:
        pair = Pair.read(TargetFolder.open(target), draft)
        count, method = speculative["num_speculative_tokens"], speculative.get("method")
        findings = static_findings(pair, method=method, num_speculative_tokens=count)
    # For example, vLLM has not downloaded the target yet. It will report any error.
    except (ValueError, OSError, KeyError):
        return
    yield from (f"{finding.problem}: {finding.cure}" for finding in findings)
