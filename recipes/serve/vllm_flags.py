"""vLLM's flags beside a draft, a target and records, looked at before the server starts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.eval.engine.counters import EMBEDS_BESIDE_DRAFT, LOG_STATS_OFF
from redraft.eval.engine.proxies import is_local
from redraft.heads.doctor.pair import Pair
from redraft.heads.files.target_folder import TargetFolder
from redraft.online.fleet.reach import UNIX_SOCKET, WANTS_CERTIFICATE

DEV_MODE = "VLLM_SERVER_DEV_MODE"

ALIASES = {
    "sc": "speculative_config", "dp": "data_parallel_size", "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
}  # fmt: skip

OWN = {
    "model": "the target is the first argument of redraft serve",
    "model_weights": "the target is the first argument of redraft serve",
    "speculative_config": "give --draft and its options before the --",
    "spec_method": "give --draft before the --",
    "spec_model": "give --draft before the --",
    "spec_tokens": "give --num-speculative-tokens before the --",
}
"""Flags which would replace those of redraft, and the flag to give instead."""

WARNINGS = {
    "disable_log_stats": LOG_STATS_OFF,
    "uds": UNIX_SOCKET,
    "ssl_cert_reqs": WANTS_CERTIFICATE,
}
"""Flags with which a part of redraft does not reach the server, or reads nothing there."""

READ = (
    *(
        *ALIASES.values(),
        *OWN,
        *WARNINGS,
        "config",
        "enable_prompt_embeds",
        "gpu_memory_utilization",
        "host",
    ),
    *("load_format", "port", "served_model_name", "ssl_keyfile"),
)
"""All flags that `redraft serve` and `redraft up` look at."""


def read_flags(arguments: Sequence[str]) -> dict[str, str]:
    """vLLM's arguments as values by name, with underscores.

    Those of a `--config` file too, which the others override.

    Raises:
        ValueError, OSError: if the file cannot be read.
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
    import yaml  # type: ignore[import-untyped]  # with huggingface_hub, and only for a server with such a file

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} has no settings of vLLM: it must be lines of the form `port: 8001`"
        )
    # `key: false` leaves a switch out.
    return {
        _find_name(str(key), READ): str(value)
        for key, value in content.items()
        if value is not False
    }


def _find_name(given: str, known: Collection[str]) -> str:
    """The whole name of a flag. vLLM takes the beginning of a name for the flag, if no other begins
    so.
    """
    name = given.replace("-", "_")
    found = [whole for whole in known if whole == name] or [
        whole for whole in known if whole.startswith(name)
    ]
    return ALIASES.get(found[0], found[0]) if len({*found}) == 1 else name


def require_agreement(flags: Mapping[str, str], *, has_model: bool, records: bool) -> None:
    """Raise ValueError for a flag of vLLM beside which draft or records would be wrong.

    `has_model`: the draft is a model, not a lookup. `records`: the server captures traffic.
    """
    for name in OWN.keys() & flags.keys():
        flag = f"--{name.replace('_', '-')}"
        raise ValueError(f"{flag} belongs to redraft: {OWN[name]}, and leave it out")
    if has_model and "enable_prompt_embeds" in flags:
        raise ValueError(EMBEDS_BESIDE_DRAFT)
    if records and flags.get("load_format") == "dummy":
        raise ValueError(
            "--load-format dummy serves random weights, and records would name the target: leave "
            "it out"
        )


def require_private(flags: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raise ValueError if others could use vLLM's development mode, whose routes replace weights
    without a token.
    """
    if environment.get(DEV_MODE, "0") == "0" or "uds" in flags or is_local(flags.get("host", "")):
        return
    raise ValueError(
        f"{DEV_MODE}=1 lets whoever reaches the server replace the weights: add --host 127.0.0.1 "
        "after the --, or "
        "leave it out and load weights by POST /redraft/target"
    )


def list_warnings(
    flags: Mapping[str, str], target: str, draft: Path | None, speculative: Mapping[str, Any]
) -> Iterator[str]:
    """Lines about flags and drafts, probably mistakes."""
    yield from (line for name, line in WARNINGS.items() if flags.get(name, "0") != "0")
    if draft is None:
        return
    from redraft.heads.doctor.checks import static_findings  # loads torch

    try:
        pair = Pair.read(TargetFolder.open(target), draft)
        count, method = speculative["num_speculative_tokens"], speculative.get("method")
        findings = static_findings(pair, method=method, num_speculative_tokens=count)
    except (
        ValueError,
        OSError,
        KeyError,
    ):  # e.g. a target that vLLM has yet to download: vLLM says what is wrong
        return
    yield from (f"{finding.problem}: {finding.cure}" for finding in findings)
