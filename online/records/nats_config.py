"""Settings and names of the ingest log on NATS JetStream.

    stream   redraft-<fleet>             one per fleet; servers publish to it, the learner consumes it
    subject  redraft.<fleet>.<domain>    separates access rights, and learners, by domain

This module does not import nats-py, which is optional, because every command and every process of a
vLLM server reads this module.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from redraft.files.setting_error import SettingError
from redraft.online.tokens import require_private

NO_DOMAIN = "all"  # Last token of the subject for a record without a domain.
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")  # dots, stars and spaces have a meaning in a subject


@dataclass(frozen=True, kw_only=True)
class Nats:
    fleet: str = "default"
    """Name of the fleet, i.e. of all servers with the same learner. Fleets on the same NATS server
    have separate streams.
    """
    credentials: Path | None = None
    """Credentials for NATS: a .creds file, or a file with an NKey seed. Other users must not be
    able to read it. Alternatively, put user and password into the address.
    """
    ca: Path | None = None
    """PEM file with the server's CA certificates. Needed only if the certificate is not signed by a
    public authority.
    """
    certificate: Path | None = None
    """PEM file with the client's certificate and key, for a server that requires client
    certificates.
    """

    def __post_init__(self) -> None:
        if not self.fleet or _UNFIT.search(self.fleet):
            raise SettingError(f"{{nats.fleet}} is {self.fleet!r}: use letters, digits, - and _")
        for name in ("credentials", "ca", "certificate"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise SettingError(f"{{nats.{name}}}: there is no file {path}")
        if self.credentials is not None:
            require_private(self.credentials)

    @property
    def stream(self) -> str:
        return f"redraft-{self.fleet}"

    @property
    def subjects(self) -> str:
        return f"redraft.{self.fleet}.>"

    def subject(self, domain: str) -> str:
        return f"redraft.{self.fleet}.{to_subject_token(domain) or NO_DOMAIN}"


@dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """Limits on records that no learner has read yet.

    Beyond these limits, the log drops the oldest records.
    """

    max_bytes: int = 8 << 30
    """Maximum size of the log in bytes. Above it, the oldest records are dropped."""
    max_age_s: float = 86400
    """Maximum age of a record in seconds. Older records are dropped from the log, even if no
    learner has read them.
    """
    replicas: int = 1
    """Number of replicas of the stream in a NATS cluster: 1, 3 or 5."""

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.max_age_s <= 0 or self.replicas < 1:
            raise SettingError(
                "{stream.max_bytes}, {stream.max_age_s} and {stream.replicas} must all be above 0"
            )


def to_subject_token(domain: str) -> str:
    """Return a domain's unique subject token. A sanitised or reserved name gets a hash suffix."""
    part = _UNFIT.sub("_", domain)
    is_itself = part == domain and domain != NO_DOMAIN
    return part if is_itself else f"{part}-{hashlib.sha256(domain.encode()).hexdigest()[:8]}"


def parse_addresses(ingest: str) -> list[str]:
    """Split an ingest address into the addresses of the individual servers.

    Raises:
        ValueError: one of them is not a nats:// or tls:// address.
    """
    found = [address.strip() for address in ingest.split(",")]
    for address in found:
        parts = urlsplit(address)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            shown = (
                f"{parts.scheme}://{parts.hostname}" if parts.hostname else address
            )  # without a password
            raise SettingError(
                f"{{ingest}} is {shown!r}: it must be nats://HOST:4222 or tls://HOST:4222"
            )
    return found


def hide_credentials(ingest: str) -> str:
    """Return the address without user and password, for messages and logs."""
    return ",".join(
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        for parts in map(urlsplit, parse_addresses(ingest))
    )
