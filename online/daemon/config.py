"""The learner's settings: a TOML file with one table per part.

This module imports neither torch nor vLLM, because every command loads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from redraft.files.setting_error import SettingError
from redraft.files.settings import read_toml
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.rollout import RolloutPolicy
from redraft.online.learning.config import BufferConfig, DraftConfig, Judging, Replay, Training
from redraft.online.learning.gate import Policy
from redraft.online.learning.staleness import SleepPolicy
from redraft.online.page.config import Page
from redraft.online.records.nats_config import Nats, StreamLimits, parse_addresses


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    target: Path = field(metadata={"example": "models/llama-3.1-70b"})
    """Folder of the target that the servers run. The learner reads only its fingerprint, tokenizer
    and config, and its embeddings if the draft is a head. It never loads the target model.
    """
    registry: Path = field(metadata={"example": "drafts/llama-3.1-70b"})
    """Folder with the draft versions; must be the value of --registry on the servers. A registry
    belongs to one learner.
    """
    spool: Path | None = field(default=None, metadata={"example": "spool"})
    """Folder to which the servers write records; must be the value of --capture.spool of `redraft
    serve`. Set either `spool` or `ingest`.
    """
    ingest: str = field(default="", repr=False)
    """NATS log to which the servers send records instead; must be the value of --capture.ingest of
    `redraft serve`, e.g. nats://HOST:4222. Separate several addresses with commas; use tls:// for
    TLS. Remove `spool` if you set this.
    """
    folder: Path = Path("learner")
    """Folder for the learner's state, checkpoints, journal and buffer. It contains users' text."""
    zero_retention: bool = False
    """Keep records in memory only. The spool must be in memory too, e.g. below /dev/shm. A restart
    loses all records and continues from the served version.
    """
    keep_versions: int = 20
    """Number of versions to keep in the registry. The current version, the previous one, versions
    that a server still runs and the version from which training started are always kept.
    """
    wandb: str | None = None
    """Weights & Biases project to log to. Without a login, the log is kept offline."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    replay: Replay = field(default_factory=Replay)
    training: Training = field(default_factory=Training)
    judging: Judging = field(default_factory=Judging)
    gate: Policy = field(default_factory=Policy)
    sleep: SleepPolicy = field(default_factory=SleepPolicy)
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)
    page: Page = field(default_factory=Page)
    nats: Nats = field(default_factory=Nats)
    stream: StreamLimits = field(default_factory=StreamLimits)

    def __post_init__(self) -> None:
        if bool(self.ingest) == bool(self.spool):
            raise SettingError(
                "no source of records: set either {spool} (a folder) or {ingest} (nats://...)"
            )
        if self.ingest:
            parse_addresses(self.ingest)

    @property
    def buffer_config(self) -> BufferConfig:
        """The buffer's settings with the folder filled in; no folder means memory only."""
        folder = None if self.zero_retention else self.buffer.folder or self.folder / "buffer"
        return replace(self.buffer, folder=folder)


def load_config(path: Path, overrides: Sequence[str] = ()) -> LearnerConfig:
    """Read the learner's settings from `path`. Raises the same errors as `read_toml`."""
    config = read_toml(path, LearnerConfig, overrides)
    # The default folder is not read from the file, so `read_toml` did not resolve it.
    return replace(config, folder=path.parent.absolute() / config.folder)
