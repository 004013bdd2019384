"""Settings of the plugin. `engine.settings` passes them to the processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from redraft.engine.live_file import LiveConfig
from redraft.engine.settings import VARIABLE, read_settings
from redraft.files.settings import convert, require_known
from redraft.online.records.outlet import Recording, Sample
from redraft.online.records.states import HiddenFormat
from redraft.online.tokens import find_token

PLUGIN_NAME = "redraft"
LOG_RECORD_BYTES = 15 << 19  # 7.5 MiB, because NATS accepts messages of up to 8 MiB.
SPOOL_RECORD_BYTES = 32 << 20  # larger, so that a head has more tokens to attend to


@dataclass(frozen=True, kw_only=True)
class ServerSample(Sample):
    """The share of a server's traffic to record."""

    hidden_format: HiddenFormat = "bfloat16"
    """Format of the recorded hidden states. float8 halves their size, but learners of earlier
    releases cannot read it.
    """


@dataclass(frozen=True, kw_only=True)
class CaptureConfig(ServerSample, Recording):
    """Settings for capture in the plugin."""

    hidden_states: bool = False
    """Also record the target's hidden states, which draft heads such as EAGLE learn from. Size per
    token: 2 bytes times the hidden size times the number of layers read. Reduce --capture.fraction
    to record less.
    """

    @property
    def record_bytes(self) -> int:
        """Maximum size of a record, in bytes."""
        return LOG_RECORD_BYTES if self.ingest else SPOOL_RECORD_BYTES


# vLLM's name for the table of draft tokens by batch size.
TABLE = "num_speculative_tokens_per_batch_size"


def list_arms(most: int, *, is_adaptive: bool = False) -> list[int]:
    """Return the numbers of draft tokens that `--pace auto` chooses from.

    If vLLM verifies adaptively (`is_adaptive`), vLLM decides how many of the `most` tokens it
    verifies. The pace can then save only the draft's own pass.
    """
    between = () if is_adaptive else (1, 2, 3, 5, 8, 12)
    return [0, *(arm for arm in between if arm < most), most]


def make_table(most: int, *, is_adaptive: bool = False) -> list[list[int]]:
    """Return a vLLM table with one row per number of draft tokens.

    The V2 runner captures CUDA graphs for each number whose row lies within the largest batch size.
    `most` comes first, for one request, and again last, for all larger batches.
    """
    arms = [most, *list_arms(most, is_adaptive=is_adaptive)]
    return [[size, size, arm] for size, arm in enumerate(arms, start=1)]


SwapCache = Literal["auto", "keep", "draft", "clear"]


@dataclass(frozen=True, kw_only=True)
class SwapConfig:
    """Settings for swaps."""

    cache: SwapCache = "auto"
    """How a swap handles the KV cache. `clear`: prefill everything again, for target and draft.
    `draft`: keep the target's keys and values, and prefill the text again with the new draft; for
    standalone drafts only. `keep`: keep the cache of running requests; later requests do not reuse
    blocks that another version wrote. `auto`: `keep` for Medusa, MTP, EAGLE-1 and EAGLE-3, `draft`
    for standalone drafts that support it, otherwise `clear`.
    """


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Keys of the JSON object in REDRAFT_SETTINGS. Paths are absolute."""

    registry: Path | None = None
    """Folder with the draft versions (v000001, ...). Without it, drafts cannot be swapped."""
    targets: tuple[Path, ...] = ()
    """Folders from which a trainer may load target weights."""
    token_file: Path | None = None
    """File with the bearer token. Without it, the token is read from the variable REDRAFT_TOKEN.
    Without a token, the routes refuse every request.
    """
    allow_remote: bool = False
    """Accept requests to the routes from other machines as well."""
    pace: str = "off"
    """Number of draft tokens per step. `auto`: choose it in each step; a number: use this number;
    `off`: leave it to vLLM.
    """
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    swap: SwapConfig = field(default_factory=SwapConfig)
    live: LiveConfig = field(default_factory=LiveConfig)
    lookup: dict[str, Any] = field(default_factory=dict)
    """Settings of live counts, and of lookups before a head, as `redraft serve --draft` writes
    them.
    """
    engine_wait: bool = False
    """Install only the patches for engines that redraft starts itself, and skip the rest of the
    plugin.
    """


@dataclass(frozen=True, kw_only=True)
class PluginConfig(Settings):
    """The settings together with the token."""

    token: str | None = field(default=None, repr=False)


def is_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether VLLM_PLUGINS names redraft.

    That the plugin was loaded is not enough, because vLLM loads every installed plugin if
    VLLM_PLUGINS is unset.
    """
    return PLUGIN_NAME in environment.get("VLLM_PLUGINS", "").split(",")


def read_config(environment: Mapping[str, str] = os.environ) -> PluginConfig:
    """Read the plugin's settings from the environment.

    Raises:
        ValueError: a setting is unknown or invalid.
        FileNotFoundError: the token file, the registry or a folder in `targets` does not exist.
    """
    values = read_settings(environment)
    require_known(values, Settings, f"{VARIABLE}: ")
    config: PluginConfig = convert(values, PluginConfig, VARIABLE, Path)
    if config.registry is not None and not config.registry.is_dir():
        raise FileNotFoundError(f"registry {config.registry} is not a folder: create it")
    for folder in config.targets:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"targets contains {folder}, which is not a folder: create it, or remove it"
            )
    check_pace(config.pace)
    return replace(config, token=find_token(config.token_file, environment))


def check_pace(pace: str, most: int | None = None) -> str:
    """Return `pace` unchanged if it is valid.

    Raises:
        ValueError: it is not a pace, or it is a number above `most`.
    """
    if pace not in ("off", "auto", "adaptive") and not pace.isdecimal():
        raise ValueError(
            f"{pace} is not a valid pace: use auto, adaptive, off or a number of draft tokens"
        )
    if most is not None and pace.isdecimal() and int(pace) > most:
        raise ValueError(
            f"pace {pace} is above --num-speculative-tokens {most}: raise the latter, or lower the pace"
        )
    return pace
