"""The sampling parameters of a request, and those in the target's folder.

This module does not import torch, because control planes use it too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from redraft.files.folder import open_folder, read_generation_config
from redraft.files.setting_error import SettingError

# vLLM's smallest temperature above 0 (`_MAX_TEMP` in its sampling_params.py).
MIN_TEMPERATURE = 0.01

PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Additional parameters that a server reads from the target's folder, with their neutral values."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request is sampled. The defaults are vLLM's for a target that sets no parameters."""

    temperature: float = 1.0
    """Temperature of the request. At 0, the most probable token is chosen, whatever the filters."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this value; 1 keeps all.
    """
    top_k: int = 0
    """Sample from this many of the most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the highest probability; 0 keeps all."""

    def __post_init__(self) -> None:
        ranges = {
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p <= 1,
        }
        if wrong := [name for name, is_right in ranges.items() if not is_right]:
            raise SettingError(f"no engine accepts {{{wrong[0]}}} {getattr(self, wrong[0])}")

    @property
    def has_filter(self) -> bool:
        """Whether the filters exclude part of the vocabulary from sampling."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def words(self) -> str:
        """The parameters that have an effect, e.g. `temperature 0.7, top_p 0.8`."""
        changed = {
            name: value
            for name, value in asdict(self).items()
            if value != getattr(ALL_TOKENS, name)
        }
        shown = {"temperature": self.temperature} | (changed if self.has_filter else {})
        return ", ".join(f"{name} {value:g}" for name, value in shown.items())

    def at(self, temperature: float) -> Sampling:
        """Return the same filters at a different temperature, as vLLM applies them.

        At 0, the filters are dropped. A temperature between 0 and 0.01 becomes 0.01.
        """
        if temperature == 0:
            # Filters cannot change the most probable token, so all greedy requests compare as
            # equal.
            return GREEDY
        return replace(self, temperature=max(temperature, MIN_TEMPERATURE))


GREEDY = Sampling(temperature=0.0)
ALL_TOKENS = Sampling()


def read_sampling(target: str | Path) -> Sampling:
    """Return the sampling for a request that sets no parameter.

    It comes from the target's generation_config.json, which is read in the same way as in vLLM.

    Raises:
        ValueError: the file contains a value that no engine accepts.
    """
    config = read_generation_config(open_folder(target))
    given = {
        field.name: config[field.name]
        for field in fields(Sampling)
        if config.get(field.name) is not None
    }
    if "top_k" in given:
        given["top_k"] = max(int(given["top_k"]), 0)  # -1 also keeps all tokens
    try:
        return Sampling(**given)
    except SettingError as error:  # no flag has given it
        raise ValueError(f"{target}, generation_config.json: {error}") from error


def choose_sampling(
    target: str | Path,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
) -> Sampling:
    """Return the given parameters, with the target's values for those that are None."""
    given: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
    }
    return replace(
        read_sampling(target), **{name: value for name, value in given.items() if value is not None}
    )


def require_served(sampling: Sampling, *, way_out: str = "") -> None:
    """Raise ValueError if vLLM refuses requests with this sampling when it uses a draft.

    `way_out` describes an alternative to turning min_p off.
    """
    if sampling.min_p:
        raise ValueError(
            f"vLLM refuses min_p {sampling.min_p:g} when it uses a draft: set --min-p 0{way_out}. If "
            "the target's generation_config.json sets min_p, start servers with "
            """--override-generation-config '{"min_p": 0}'"""
        )


def list_penalties(target: str | Path) -> dict[str, float]:
    """Return the penalties that a server reads from the target's folder, by name.

    Forecasts ignore them.
    """
    config = read_generation_config(open_folder(target))
    return {
        name: config[name]
        for name, neutral in PENALTIES.items()
        if config.get(name) not in (None, neutral)
    }


def read_defaults(target: str | Path) -> dict[str, float]:
    """Return all sampling parameters, including penalties, for a request that sets none."""
    return asdict(read_sampling(target)) | list_penalties(target)
