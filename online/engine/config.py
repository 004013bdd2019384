"""Settings of the plugin, read from the environment: every process of a vLLM server inherits it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from redraft.online.records.nats_config import Nats
from redraft.online.records.outlet import Recording, Sample
from redraft.online.records.states import HiddenFormat
from redraft.online.tokens import check_token, read_token

PLUGIN_NAME = "redraft"
LOG_RECORD_BYTES = 15 << 19  # 7.5 MiB: NATS takes messages of up to 8 MiB.
SPOOL_RECORD_BYTES = 32 << 20  # longer ones: a head has more tokens to attend to


@dataclass(frozen=True, kw_only=True)
class ServerSample(Sample):
    """The recorded part of a server's traffic."""

    hidden_format: HiddenFormat = "bfloat16"
    """Format of the recorded hidden states. With float8 they take half of the space; a learner of
    an earlier release cannot read them.
    """


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(ServerSample, Recording):
    """Settings of the plugin's capture.

    The environment sets them as REDRAFT_CAPTURE_SPOOL and so on, with tenants separated by commas,
    and those of the ingest log as REDRAFT_NATS_FLEET, REDRAFT_NATS_CREDENTIALS, REDRAFT_NATS_CA and
    REDRAFT_NATS_CERTIFICATE.
    """

    hidden_states: bool = False
    """Also record the hidden states of the target; a draft head such as EAGLE learns from them.
    Size per token: 2 bytes times the hidden size times the number of layers read. Lower
    --capture.fraction to record less.
    """

    @property
    def record_bytes(self) -> int:
        """Size limit of a record, in bytes."""
        return LOG_RECORD_BYTES if self.ingest else SPOOL_RECORD_BYTES


TABLE = "num_speculative_tokens_per_batch_size"  # vLLM's: draft tokens by batch size


def list_arms(most: int) -> list[int]:
    """Numbers of draft tokens that `--pace auto` chooses from."""
    return [0, *(arm for arm in (1, 2, 3, 5, 8, 12) if arm < most), most]


def make_table(most: int) -> list[list[int]]:
    """A vLLM table with a row per number.

    The V2 runner captures CUDA graphs for each within the largest batch size. `most` comes first,
    for one request, and last, for all larger batches.
    """
    return [[size, size, arm] for size, arm in enumerate([most, *list_arms(most)], start=1)]


SwapCache = Literal["auto", "keep", "draft", "clear"]


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Settings of swaps."""

    cache: SwapCache = "auto"
    """Fate of cached keys and values at a swap. `clear`: target and draft read everything again.
    `draft`: the target's stay, and the new draft reads the text again; for standalone drafts
    only. `keep`: all stay, and those of the old draft fade out. `auto`: `keep` for Medusa, MTP,
    EAGLE-1 and EAGLE-3, `draft` for a standalone draft that can read again, else `clear`.
    """


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    registry: Path | None = None
    """REDRAFT_REGISTRY: folder of the draft's versions (v000001, ...). Without it no draft can be
    swapped.
    """
    targets: tuple[Path, ...] = ()
    """REDRAFT_TARGETS: folders, separated by colons. A trainer may load target weights from within
    them.
    """
    token: str | None = field(default=None, repr=False)
    """Content of the file REDRAFT_TOKEN_FILE, or without that file REDRAFT_TOKEN. Without a token the
    routes refuse every request.
    """
    allow_remote: bool = False
    """REDRAFT_ALLOW_REMOTE=1: the routes answer other machines too."""
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    """REDRAFT_SWAP_CACHE."""


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether VLLM_PLUGINS names redraft.

    Being loaded is not enough: if unset, vLLM loads every installed plugin.
    """
    return PLUGIN_NAME in environment.get("VLLM_PLUGINS", "").split(",")


def read_config(environment: Mapping[str, str] = os.environ) -> PluginConfig:
    """The plugin's settings.

    Raises:
        ValueError
        FileNotFoundError: no token file or registry.
    """
    registry = _read_path(environment, "REGISTRY")
    if registry is not None and not registry.is_dir():
        raise FileNotFoundError(
            f"REDRAFT_REGISTRY={registry} is not a folder: create it, or unset the variable"
        )
    targets = tuple(
        map(Path, filter(None, environment.get("REDRAFT_TARGETS", "").split(os.pathsep)))
    )
    for folder in targets:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"REDRAFT_TARGETS names {folder}, which is no folder: create it, or leave it out"
            )
    file = _read_path(environment, "TOKEN_FILE")
    return PluginConfig(
        targets=targets,
        registry=registry,
        token=_read_token(environment.get("REDRAFT_TOKEN"), file),
        allow_remote=environment.get("REDRAFT_ALLOW_REMOTE") == "1",
        capture=_read_capture(environment),
        swap=SwapConfig(cache=_read_choice(environment, "SWAP_CACHE", get_args(SwapCache), "auto")),
    )


def check_pace(pace: str, most: int | None = None) -> str:
    """The same text. Raises: ValueError if it is no pace, or a number above `most`."""
    if pace not in ("off", "auto") and not pace.isdecimal():
        raise ValueError(f"{pace} is no pace: give off, auto or a number of draft tokens")
    if most is not None and pace.isdecimal() and int(pace) > most:
        raise ValueError(
            f"pace {pace} is above --num-speculative-tokens, {most}: raise that, or lower the pace"
        )
    return pace


def _read_choice(
    environment: Mapping[str, str], name: str, known: tuple[Any, ...], default: str
) -> Any:
    """The one of the `known` that a variable of the plugin names.

    Raises:
        ValueError
    """
    found = environment.get(f"REDRAFT_{name}") or default
    if found not in known:
        raise ValueError(f"REDRAFT_{name}={found} is not one of {', '.join(known)}")
    return found


def _read_path(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(f"REDRAFT_{name}")
    return Path(value) if value else None


def _read_capture(environment: Mapping[str, str]) -> CaptureConfig:
    tenants = environment.get("REDRAFT_CAPTURE_TENANTS", "")
    return CaptureConfig(
        spool=_read_path(environment, "CAPTURE_SPOOL"),
        ingest=environment.get("REDRAFT_CAPTURE_INGEST", ""),
        nats=Nats(
            fleet=environment.get("REDRAFT_NATS_FLEET", Nats.fleet),
            credentials=_read_path(environment, "NATS_CREDENTIALS"),
            ca=_read_path(environment, "NATS_CA"),
            certificate=_read_path(environment, "NATS_CERTIFICATE"),
        ),
        fraction=float(environment.get("REDRAFT_CAPTURE_FRACTION", CaptureConfig.fraction)),
        tenants=tuple(tenants.split(",")) if tenants else (),
        logprobs=int(environment.get("REDRAFT_CAPTURE_LOGPROBS", CaptureConfig.logprobs)),
        spool_bytes=int(environment.get("REDRAFT_CAPTURE_SPOOL_BYTES", CaptureConfig.spool_bytes)),
        hidden_states=environment.get("REDRAFT_CAPTURE_HIDDEN_STATES") == "1",
        hidden_format=_read_choice(
            environment, "CAPTURE_HIDDEN_FORMAT", get_args(HiddenFormat), "bfloat16"
        ),
    )


def _read_token(token: str | None, file: Path | None) -> str | None:
    if file:  # first, as for the learner
        return read_token(file)
    return check_token(token, "REDRAFT_TOKEN") if token else None
