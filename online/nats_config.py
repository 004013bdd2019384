"""The ingest log on NATS JetStream: how its server is reached, what it keeps, and under which names.

    stream   redraft-<fleet>             of one fleet; a learner takes from it what servers put in
    subject  redraft.<fleet>.<domain>    so that rights, and learners, can be parted by domain

Loads nothing of NATS: it is read by every process of a vLLM server and by every command.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

NO_DOMAIN = "all"
"""The last part of the subject for a record of no domain."""

_UNFIT = re.compile(r"[^A-Za-z0-9_-]")
"""A domain is what a client calls it; in a subject dots, stars and blanks have a meaning."""


@dataclass(frozen=True, kw_only=True)
class Nats:
    fleet: str = "default"
    """The servers that one learner learns from; their records are apart from those of other fleets on this NATS."""
    credentials: Path | None = None
    """A .creds file, or one that holds an NKey's seed. A user with a password can also stand in the address."""
    ca: Path | None = None
    """Certificates to know the server by (PEM), where no public authority has signed its own."""
    certificate: Path | None = None
    """Our own certificate and its key in one file (PEM), for a server that asks for one."""

    def __post_init__(self) -> None:
        if not self.fleet or _UNFIT.search(self.fleet):
            raise ValueError(f"nats.fleet is {self.fleet!r}: use letters, digits, - and _")
        for name in ("credentials", "ca", "certificate"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise FileNotFoundError(f"nats.{name}: there is no file {path}")

    @property
    def stream(self) -> str:
        return f"redraft-{self.fleet}"

    @property
    def subjects(self) -> str:
        """All of this fleet's."""
        return f"redraft.{self.fleet}.>"

    def subject(self, domain: str) -> str:
        """Where the records of one domain go."""
        return f"redraft.{self.fleet}.{subject_part(domain) or NO_DOMAIN}"


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """What the log holds of records that no learner has taken yet; beyond it the oldest go."""

    max_bytes: int = 8 << 30
    max_age_s: float = 86400
    replicas: int = 1
    """Servers of a NATS cluster that each keep a copy: 1, 3 or 5."""

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.max_age_s <= 0 or self.replicas < 1:
            raise ValueError("stream.max_bytes, stream.max_age_s and stream.replicas must be above 0")


def subject_part(domain: str) -> str:
    """Of no other domain: what had to be replaced, or stands for none, is told apart by a hash."""
    part = _UNFIT.sub("_", domain)
    is_itself = part == domain and domain != NO_DOMAIN
    return part if is_itself else f"{part}-{hashlib.sha256(domain.encode()).hexdigest()[:8]}"


def addresses(ingest: str) -> list[str]:
    """The servers of an address such as nats://one:4222,nats://two:4222.

    Raises: ValueError where one is of another kind.
    """
    found = [address.strip() for address in ingest.split(",")]
    for address in found:
        parts = urlsplit(address)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            shown = f"{parts.scheme}://{parts.hostname}" if parts.hostname else address  # without a password
            raise ValueError(f"ingest names {shown!r}: it must be nats://HOST:4222 or tls://HOST:4222")
    return found


def shown(ingest: str) -> str:
    """The address for people and logs, without user and password."""
    return ",".join(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" for parts in map(urlsplit, addresses(ingest)))
