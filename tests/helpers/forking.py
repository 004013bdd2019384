"""A vLLM server whose processes fork instead of importing vLLM three times."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "forked_engine"


def forking() -> dict[str, str]:
    """The variable for a server whose processes fork.

    Only tests of quick engines use it. All others start them as users do.
    """
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
