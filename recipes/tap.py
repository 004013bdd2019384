"""Record what an untouched vLLM says, by a proxy in front of it: point the clients at this instead of at vLLM.

    $ redraft tap http://127.0.0.1:8000 --target /models/llama --spool spool --port 8001

vLLM returns at most --max-logprobs (20 unless told otherwise) probabilities a token. Drafts are unknown here, so these
records train a draft but tell nothing of its acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
import uvicorn

from heads.artifact import fingerprint
from online.nats_config import Nats
from online.plugin_config import CaptureConfig
from online.tap import Tap


@dataclass(frozen=True, kw_only=True)
class Config:
    upstream: Annotated[str, tyro.conf.Positional]
    """The vLLM server's address."""
    target: Path
    """Folder of the model that it serves: records name it by its fingerprint."""
    spool: Path | None = None
    """Folder that receives the records."""
    ingest: str = ""
    """The log that receives them instead: nats://HOST:4222, several with commas, tls:// for TLS."""
    nats: Nats = field(default_factory=Nats)
    host: str = "127.0.0.1"
    port: int = 8001
    top_k: int = 20
    fraction: float = 1.0
    """Of all requests."""
    tenants: tuple[str, ...] = ()
    """Only requests with one of these in X-Redraft-Tenant; empty: all."""
    spool_bytes: int = 1 << 30
    """Above it the oldest records are dropped."""


def main(cfg: Config) -> None:
    capture = CaptureConfig(
        spool=cfg.spool,
        ingest=cfg.ingest,
        nats=cfg.nats,
        fraction=cfg.fraction,
        tenants=frozenset(cfg.tenants) or None,
        top_k=cfg.top_k,
        spool_bytes=cfg.spool_bytes,
    )
    tap = Tap(cfg.upstream, capture, fingerprint(cfg.target))
    uvicorn.run(tap.app(), host=cfg.host, port=cfg.port, log_level="warning")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
