"""What the plugin is told: read from the environment, which every process of a vLLM server inherits."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from online.nats_config import Nats, addresses

PLUGIN_NAME = "redraft"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What is recorded of live traffic, and where that goes: to one of `spool` and `ingest`, or nothing is recorded."""

    spool: Path | None = None
    """Folder that receives what the target said."""
    ingest: str = field(default="", repr=False)
    """The log that receives it instead: nats://HOST:4222, several with commas, tls:// for TLS."""
    nats: Nats = field(default_factory=Nats)
    fraction: float = 1.0
    """Of all requests."""
    tenants: tuple[str, ...] = ()
    """Only requests with one of these in X-Redraft-Tenant; empty: all. X-Redraft-Opt-Out: 1 always keeps one out."""
    top_k: int = 32
    """Token probabilities recorded at every position."""
    spool_bytes: int = 1 << 30
    """Above it the oldest records are dropped."""

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}: it must lie between 0 and 1")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 1")
        if self.ingest and self.spool:
            raise ValueError("records go to a spool or to an ingest log: set one of them")
        if self.ingest:
            addresses(self.ingest)

    @property
    def is_on(self) -> bool:
        return bool(self.spool or self.ingest)

    def skips(self, tenant: str, draw: bytes) -> str:
        """Why a request of this tenant is not recorded, empty where it is; an even share of all `draw` is."""
        if self.tenants and tenant not in self.tenants:
            return "tenant"
        return "" if zlib.crc32(draw) < self.fraction * 2**32 else "fraction"


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(Recording):
    """What the plugin records; in the environment REDRAFT_CAPTURE_SPOOL and so on, tenants comma-separated, the log's
    REDRAFT_NATS_FLEET, REDRAFT_NATS_CREDENTIALS, REDRAFT_NATS_CA and REDRAFT_NATS_CERTIFICATE."""

    hidden_states: bool = False
    """Record what a head (EAGLE) reads of the target too, which it learns from: two bytes for every number of every
    layer that it reads. Sample with --capture.fraction."""


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
    tenants = environment.get("REDRAFT_CAPTURE_TENANTS", "")
    return CaptureConfig(
        spool=Path(spool) if spool else None,
        ingest=ingest,
        nats=_nats(environment),
        fraction=float(environment.get("REDRAFT_CAPTURE_FRACTION", CaptureConfig.fraction)),
        tenants=tuple(tenants.split(",")) if tenants else (),
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
