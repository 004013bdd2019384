"""What the learner is told: one TOML file, read into frozen dataclasses. Loads neither torch nor vLLM."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints
from urllib.parse import urlsplit

import msgspec

from online.buffer import BufferConfig, Replay
from online.fleet import require_address
from online.gate import Policy
from online.nats_config import Nats, StreamLimits, addresses
from online.request_origin import require_label
from online.rollout import RolloutPolicy

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    family: str = "standalone"
    """standalone, eagle1 or eagle3. A head learns from records of servers with --capture.hidden-states."""
    initial: Path | None = None
    """Folder of the draft that becomes version v000001; not needed once the registry has a version."""


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    servers: tuple[str, ...] = ()
    """Addresses of the vLLM servers, such as http://10.0.0.5:8000. The first that answers is the canary."""
    file: Path | None = None
    """fleet.toml, a list of servers that several learners share; it is read again at every look."""
    name: str = ""
    """Such as http://vllm.default.svc:8000: every address behind the name is a server, as of a headless service."""
    token_file: Path | None = None
    """File with the bearer token of /redraft/...; or set REDRAFT_TOKEN."""
    poll_s: float = 10
    """Between two looks at every server: its version, its target, what it accepts."""

    def __post_init__(self) -> None:
        for server in self.servers:
            require_address(server)
        if self.name and not _has_port(self.name):
            raise ValueError(f"fleet.name is {self.name!r}: it must be like http://vllm.default.svc:8000")

    def token(self) -> str:
        """The bearer token of the servers.

        Raises: ValueError without it, or without any place to find servers in; FileNotFoundError for a missing file.
        """
        if not (self.servers or self.file or self.name):
            raise ValueError("there is no server: set fleet.servers, fleet.file or fleet.name")
        token = self.token_file.read_text().strip() if self.token_file else os.environ.get("REDRAFT_TOKEN")
        if not token:
            raise ValueError("no token of the servers: set fleet.token_file or REDRAFT_TOKEN")
        return token


def _has_port(url: str) -> bool:
    with suppress(ValueError):
        require_address(url)
        return urlsplit(url).port is not None
    return False


@dataclass(frozen=True, kw_only=True)
class Training:
    lr: float = 1e-4
    """AdamW's, constant after a warm-up."""
    warmup_steps: int = 20
    """Each time the optimizer begins anew."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    divergence: str = "forward_kl"
    """forward_kl, reverse_kl, jensen_shannon, total_variation, neg_log_alpha or lk_hybrid."""
    mixed_precision: Literal["no", "bf16"] = "no"
    fresh_per_step: int = 4
    """New records in each optimizer step, in order of arrival; every one is new once."""
    replay_per_step: int = 28
    """Records drawn again beside them."""
    branches_per_record: int = 1
    """Rejected branches of a record that are trained besides its text, drawn at random; each costs the whole text. A
    head trains none."""
    sequence_length: int = 4096
    """A longer text loses its beginning. Train at the length that is served: a draft fails beyond it."""
    accumulation: int = 1
    """Micro-batches that a step is divided into, where one does not fit the memory."""
    records_per_candidate: int = 256
    """New records between two candidates."""
    max_lag_records: int = 4096
    """Where more new records wait, the oldest are not trained as new any more; they can still be replayed."""
    max_skipped_share: float = 0.1
    """A candidate with more non-finite steps than this is thrown away."""
    patience: int = 3
    """After so many candidates in a row that proved no gain, training begins again from the served version."""
    save_every_s: float = 600
    """Between checkpoints while a candidate is in training; there is always one at its end."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("fresh_per_step", "records_per_candidate", "accumulation", "patience", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Judging:
    num_speculative_tokens: int = 3
    """What the servers draft at a time."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    """How the servers draft: as their --draft-sample-method."""
    held_out_per_domain: int = 200
    """The newest held-out records of every domain that a candidate is judged by."""


@dataclass(frozen=True, kw_only=True)
class Page:
    host: str = "127.0.0.1"
    port: int = 8400
    """Of the live page and /metrics; 0: none."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    target: Path
    """Folder of the target that the servers serve; it is looked at to know it again, and never loaded."""
    registry: Path
    """Folder of the draft's versions: the servers' --registry."""
    spool: Path | None = None
    """Folder that the servers fill with records: their --capture.spool. Or `ingest`."""
    ingest: str = field(default="", repr=False)
    """The log that the servers put records into: their --capture.ingest, such as nats://HOST:4222 (several with commas,
    tls:// for TLS). Then there is no spool."""
    domain: str = ""
    """Of a draft for one domain: only its requests, which carry it in X-Redraft-Domain, are learned from and judged by,
    and of `fleet.file` only its servers are looked after. Each domain has a learner, registry, folder and spool of its
    own; an ingest log they share, where each of its learners has a domain. Empty: all."""
    folder: Path = Path("learner")
    """The learner's own: state, checkpoints, journal, buffer. It holds users' text."""
    anchors: Path | None = None
    """File of offline records (redraft anchors) for a share of every step, against forgetting."""
    zero_retention: bool = False
    """Keep records in memory only; the spool must lie in memory too, such as below /dev/shm. A restart forgets them,
    and begins at the served version."""
    keep_versions: int = 20
    """Older versions are removed; the current one and the one before it never are."""
    wandb: str | None = None
    """Project of Weights & Biases to log to; offline where nobody is logged in."""
    draft: DraftConfig = field(default_factory=DraftConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    replay: Replay = field(default_factory=Replay)
    training: Training = field(default_factory=Training)
    judging: Judging = field(default_factory=Judging)
    gate: Policy = field(default_factory=Policy)
    rollout: RolloutPolicy = field(default_factory=RolloutPolicy)
    page: Page = field(default_factory=Page)
    nats: Nats = field(default_factory=Nats)
    stream: StreamLimits = field(default_factory=StreamLimits)

    def __post_init__(self) -> None:
        if bool(self.ingest) == bool(self.spool):
            raise ValueError("records come from a spool (a folder) or an ingest log (nats://...): set one of them")
        if self.ingest:
            addresses(self.ingest)
        require_label(self.domain)

    @property
    def buffer_config(self) -> BufferConfig:
        """Where records are kept: in memory, in `buffer.folder`, or in the learner's own folder."""
        folder = None if self.zero_retention else self.buffer.folder or self.folder / "buffer"
        return replace(self.buffer, folder=folder)


def load_config(path: Path, overrides: Sequence[str] = ()) -> LearnerConfig:
    """The learner's configuration in `path`. Raises: as `read_toml`."""
    config = read_toml(path, LearnerConfig, overrides)
    return replace(config, folder=path.parent.absolute() / config.folder)


def read_toml(path: Path, config_type: type[Config], overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path`; an override such as `training.lr=1e-3` is a line of TOML that goes on top.

    Relative paths begin at the file's folder.

    Raises: FileNotFoundError; ValueError naming what can not be, with the nearest known name for an unknown key.
    """
    if not path.is_file():
        command = config_type.__name__.removesuffix("Config").lower()
        raise FileNotFoundError(f"there is no {path}: redraft {command} --print-config > {path} begins one")
    values = _parse(path.read_text(), str(path))
    for override in overrides:
        values = _merged(values, _parse(override, f"--set {override}"))
    _require_known(values, config_type, "")

    def read_path(kind: type, value: Any) -> Any:
        if kind is Path and isinstance(value, str):
            return path.parent.absolute() / Path(value).expanduser()
        raise ValueError(f"expected a path in quotes, got {value!r}")

    try:
        return msgspec.convert(values, config_type, dec_hook=read_path)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from error


def example(config_type: type = LearnerConfig) -> str:
    """A complete TOML file: every key with its default and what it means."""
    return "\n".join(_section(config_type, ""))


FILLED_IN = {
    "LearnerConfig.target": "models/llama-3.1-70b",
    "LearnerConfig.registry": "drafts/llama-3.1-70b",
    "LearnerConfig.spool": "spool",
    "RouterConfig.fleet": "fleet.toml",
    "RouterConfig.aliases": {},
}
"""In an example, where there is no default or no useful one."""


def _section(config_type: type, name: str) -> Iterator[str]:
    documents, types = _documents(config_type), get_type_hints(config_type)
    sections = [f.name for f in fields(config_type) if is_dataclass(types[f.name])]
    for config_field in fields(config_type):
        key = config_field.name
        if key in sections or (config_type, key) == (BufferConfig, "folder"):
            continue
        yield from (f"# {line}" for line in textwrap.wrap(documents.get(key, ""), 100, break_on_hyphens=False))
        default = FILLED_IN.get(f"{config_type.__name__}.{key}", config_field.default)
        yield f"{key} = {_toml(default)}" if default is not None else f"# {key} ="
    for key in sections:
        section_type = types[key]
        assert isinstance(section_type, type)
        yield f"\n[{name}{key}]"
        yield from _section(section_type, f"{name}{key}.")


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(str(value) if isinstance(value, Path) else value)


def _documents(config_type: type) -> dict[str, str]:
    """The string under each field, which Python itself throws away."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        line.target.id: " ".join(below.value.value.split())
        for line, below in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is no TOML ({error}); strings need quotes") from error


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merged(below[key], value)
        for key, value in above.items()
        if isinstance(value, dict) and isinstance(below.get(key), dict)
    }
    return {**below, **above, **nested}


def _require_known(values: Mapping[str, Any], config_type: type, section: str) -> None:
    types = get_type_hints(config_type)
    known = [config_field.name for config_field in fields(config_type)]
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {section}{close[0]}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"there is no setting {section}{key}: {hint}")
        if isinstance(value, dict) and is_dataclass(types[key]):
            nested = types[key]
            assert isinstance(nested, type)
            _require_known(value, nested, f"{section}{key}.")
