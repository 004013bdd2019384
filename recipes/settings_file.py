"""The flags of a command whose settings are a TOML file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    config: Path
    """The TOML file."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """One setting over the file's, as a line of TOML: KEY=VALUE."""
    print_config: bool = False
    """Print a complete file with every setting's default and meaning, and end."""
