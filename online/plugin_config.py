"""What the plugin is told: read from the environment, which every process of a vLLM server inherits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from online.nats_config import Nats, addresses

PLUGIN_NAME = "redraft"


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """Where records go is one of `spool` and `ingest`; without either nothing is captured."""

    spool: Path | None = None
    """REDRAFT_CAPTURE_SPOOL: folder that receives records."""
    ingest: str = field(default="", repr=False)
    """REDRAFT_CAPTURE_INGEST: nats://HOST:4222, the log that receives records."""
    nats: Nats = field(default_factory=Nats)
    """REDRAFT_NATS_FLEET, REDRAFT_NATS_CREDENTIALS, REDRAFT_NATS_CA, REDRAFT_NATS_CERTIFICATE."""
    fraction: float = 1.0
    """REDRAFT_CAPTURE_FRACTION of all requests."""
    tenants: frozenset[str] | None = None
    """REDRAFT_CAPTURE_TENANTS, comma-separated: only these; unset: all."""
    top_k: int = 32
    """REDRAFT_CAPTURE_TOP_K."""
    spool_bytes: int = 1 << 30
    """REDRAFT_CAPTURE_SPOOL_BYTES: above it the oldest records go."""
    hidden_states: bool = False
    """REDRAFT_CAPTURE_HIDDEN_STATES=1: with what a head reads of the target, which is most of a record then."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"REDRAFT_CAPTURE_FRACTION is {self.fraction}: it must lie between 0 and 1")
        if self.top_k < 1:
            raise ValueError(f"REDRAFT_CAPTURE_TOP_K is {self.top_k}: it must be at least 1")
        if bool(self.ingest) == bool(self.spool):
            raise ValueError("records go to a spool or to an ingest log: set one of them")
        if self.ingest:
            addresses(self.ingest)


@dataclass(frozen=True, kw_only=True)
class PluginConfig:
    registry: Path | None = None
    """REDRAFT_REGISTRY: folder of the draft's versions (v000001, ...); without it nothing can be swapped."""
    token: str | None = field(default=None, repr=False)
    """REDRAFT_TOKEN, or what the file REDRAFT_TOKEN_FILE holds; without it the routes answer nobody."""
    allow_remote: bool = False
    """REDRAFT_ALLOW_REMOTE=1: the routes answer other machines too."""
    capture: CaptureConfig | None = None


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether VLLM_PLUGINS names the plugin: where that is unset vLLM loads every general plugin there is."""
    return PLUGIN_NAME in environment.get("VLLM_PLUGINS", "").split(",")


def read_config(environment: Mapping[str, str] = os.environ) -> PluginConfig:
    """The plugin's configuration.

    Raises: ValueError for a value that can not be; FileNotFoundError for a token file or registry that is not there.
    """
    registry = environment.get("REDRAFT_REGISTRY")
    if registry and not Path(registry).is_dir():
        raise FileNotFoundError(f"REDRAFT_REGISTRY={registry} is no folder: create it, or unset the variable")
    return PluginConfig(
        registry=Path(registry) if registry else None,
        token=_token(environment),
        allow_remote=environment.get("REDRAFT_ALLOW_REMOTE") == "1",
        capture=_capture(environment),
    )


def _token(environment: Mapping[str, str]) -> str | None:
    token = environment.get("REDRAFT_TOKEN")
    file = environment.get("REDRAFT_TOKEN_FILE")
    if not token and file:
        token = Path(file).read_text().strip()
        if not token:
            raise ValueError(f"REDRAFT_TOKEN_FILE={file} is empty: write the token into it")
    return token or None


def _capture(environment: Mapping[str, str]) -> CaptureConfig | None:
    spool, ingest = environment.get("REDRAFT_CAPTURE_SPOOL"), environment.get("REDRAFT_CAPTURE_INGEST", "")
    if not spool and not ingest:
        return None
    tenants = environment.get("REDRAFT_CAPTURE_TENANTS")
    return CaptureConfig(
        spool=Path(spool) if spool else None,
        ingest=ingest,
        nats=_nats(environment),
        fraction=float(environment.get("REDRAFT_CAPTURE_FRACTION", CaptureConfig.fraction)),
        tenants=frozenset(tenants.split(",")) if tenants else None,
        top_k=int(environment.get("REDRAFT_CAPTURE_TOP_K", CaptureConfig.top_k)),
        spool_bytes=int(environment.get("REDRAFT_CAPTURE_SPOOL_BYTES", CaptureConfig.spool_bytes)),
        hidden_states=environment.get("REDRAFT_CAPTURE_HIDDEN_STATES") == "1",
    )


def _nats(environment: Mapping[str, str]) -> Nats:
    def path(name: str) -> Path | None:
        value = environment.get(f"REDRAFT_NATS_{name}")
        return Path(value) if value else None

    return Nats(
        fleet=environment.get("REDRAFT_NATS_FLEET", Nats.fleet),
        credentials=path("CREDENTIALS"),
        ca=path("CA"),
        certificate=path("CERTIFICATE"),
    )
