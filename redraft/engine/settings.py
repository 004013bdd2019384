"""Settings of the plugin: one JSON object in an environment variable.

Every process of a vLLM server inherits it.

    REDRAFT_SETTINGS='{"registry": "/drafts", "pace": "auto", "capture": {"spool": "/spool"}}'

`redraft serve` writes this variable. Set it yourself if you start vLLM without that command. Its
keys are the fields of `online.engine.config.Settings`, and docs/online.md lists them.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from redraft.files.settings import merge

VARIABLE = "REDRAFT_SETTINGS"


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read the settings from an environment; empty if there are none.

    Raises:
        ValueError: the variable is not a JSON object.
    """
    text = environment.get(VARIABLE) or "{}"
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is not valid JSON ({error}): {text[:200]}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{VARIABLE} is not a JSON object: {text[:200]}")
    return settings


def write_settings(*settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable with the merged settings; later settings take precedence.

    Empty if there are no settings.
    """
    merged: Mapping[str, Any] = {}
    for more in settings:
        merged = merge(merged, more)
    return {VARIABLE: json.dumps(merged)} if merged else {}
