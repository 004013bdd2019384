"""A target that is opened once and passed on.

It consists of a folder and everything that is read from its files.

This module does not import torch, because files that need transformers are read on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redraft.files.folder import (
    check_files,
    fetch_model,
    find_dtype,
    fingerprint,
    lineage,
    open_folder,
    read_config,
    read_quantization,
)

if TYPE_CHECKING:
    from redraft.files.target_sizes import TargetSizes

TARGET_VERSION = "redraft_target_version"
"""Key of vLLM's `additional_config` under which a worker names the weights
(`online.engine.target_watch`).
"""

TargetDtype = Literal["float32", "bfloat16"]
"""Dtypes in which a target can compute and be served."""


@dataclass(frozen=True, kw_only=True)
class TargetFolder:
    """The files of a target, each read at most once."""

    name: str
    """The folder or hub name as given, for reports, servers and other processes."""
    folder: Path
    dtype: TargetDtype | None = None
    """Dtype for the target's computation. None means the stored dtype
    (`engine.target_dtype.open_target`).
    """

    @staticmethod
    def open(name_or_path: str | Path) -> TargetFolder:
        """Find the folder. For a hub name, download the small files.

        Raises the same errors as `open_folder`.
        """
        return TargetFolder(name=str(name_or_path), folder=open_folder(name_or_path))

    def in_dtype(self, dtype: TargetDtype | None) -> TargetFolder:
        """Return the same target in this dtype, with everything already read from its files."""
        other = replace(self, dtype=dtype)
        vars(other).update({name: value for name, value in vars(self).items() if name != "dtype"})
        return other

    @property
    def is_local(self) -> bool:
        """Whether the target was given as a folder instead of a hub name."""
        return self.folder == Path(self.name)

    def fetch_and_check(self) -> Path:
        """Fetch the files that are on the hub, check all files once, and return the folder.

        Raises the same errors as `fetch_model` and `check_model_folder`.
        """
        return self._checked

    @cached_property
    def _checked(self) -> Path:
        folder = fetch_model(self.name)
        _ = self.stored_config  # refuses a folder without a config
        check_files(folder)
        return folder

    @property
    def torch_dtype(self) -> Any:
        """`dtype` as a torch dtype."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    @cached_property
    def stored_config(self) -> Mapping[str, Any]:
        """The content of config.json. Raises the same errors as `read_config`."""
        return read_config(self.folder)

    @cached_property
    def config(self) -> Any:
        """The `transformers` config.

        Copy it before building a model, because that would modify it. Raises the same errors as
        `load_config`.
        """
        from redraft.files.checkpoint import load_config

        return load_config(self)

    @cached_property
    def text_config(self) -> Any:
        """The part of `config` for the language model.

        Raises:
            ValueError: the target has no language model.
        """
        config = self.config.get_text_config()
        if getattr(config, "vocab_size", None) is None:
            raise ValueError(
                f"{self.name} has no language model: a {type(config).__name__} has no vocabulary"
            )
        return config

    @property
    def sizes(self) -> TargetSizes:
        """Return the bytes of the weights in `dtype`. Raises the same errors as `size_weights`."""
        import torch

        from redraft.files.target_sizes import size_weights

        return size_weights(self.config, self.torch_dtype or self.config.dtype or torch.float32)

    @cached_property
    def quantization(self) -> str | None:
        """The name of the tool that quantised the weights.

        None if they are not quantised.
        """
        return read_quantization(self.folder, self.stored_config)

    def choose_cpu_dtype(self, has_bfloat16: Callable[[], bool]) -> TargetDtype | None:
        """Return the default dtype on a CPU (`engine.target_dtype`); None means the stored dtype.

        `has_bfloat16` says whether the CPU has bfloat16 instructions.
        """
        if self.quantization:
            return None
        stored = find_dtype(self.stored_config)
        return "bfloat16" if stored == "bfloat16" and has_bfloat16() else "float32"

    @cached_property
    def fingerprint(self) -> str:
        """The identity of the model (`folder.fingerprint`).

        Raises the same errors as `folder.fingerprint`, also if the weights are not downloaded yet.
        """
        return fingerprint(self.folder, self.stored_config)

    @cached_property
    def lineage(self) -> str:
        """The layout that drafts must fit (`folder.lineage`).

        Empty if there are no safetensors weights.

        If it is empty, only drafts for exactly these weights fit.

        Raises:
            ValueError: a file is corrupt.
        """
        try:
            return lineage(self.folder, self.stored_config)
        except FileNotFoundError:
            return ""

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with the chat template. Raises the same errors as `load_tokenizer`."""
        from redraft.files.checkpoint import load_tokenizer

        return load_tokenizer(self)

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end an engine's answer."""
        from redraft.files.checkpoint import end_ids

        return end_ids(self, self.tokenizer)

    @property
    def writes_date(self) -> bool:
        """Whether the tokenizer's chat template writes today's date."""
        return writes_date(self.tokenizer)


def writes_date(tokenizer: Any) -> bool:
    """Whether the chat template writes today's date, as with Llama 3.2, SmolLM3 and gpt-oss."""
    return "strftime_now" in str(tokenizer.chat_template)


def count_ids(tokenizer: Any) -> int:
    """Return the largest id + 1, which is more than `len(tokenizer)` if there are unused ids."""
    largest: int = max(tokenizer.get_vocab().values())
    return largest + 1
