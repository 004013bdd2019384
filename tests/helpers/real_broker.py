"""A real nats-server on a free port and in a new folder."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.broker import find_broker
from redraft.engine.process import free_port


@dataclass
class Broker:
    folder: Path
    settings: str = ""
    """Additional lines of configuration."""
    shipped: str = ""
    """A configuration of recipes/deploy to run instead, here: its files lie beside `folder`."""
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        config, log = (
            self.folder.parent / f"{self.folder.name}.conf",
            self.folder.parent / f"{self.folder.name}.log",
        )
        config.write_text(self._move_here() if self.shipped else self._configure())
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [find_broker(), "-c", str(config)], stdout=output, stderr=output
            )
        deadline_s = time.monotonic() + 300
        while not is_listening(self.port):
            assert self.process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline_s, "nats-server does not listen"
            time.sleep(0.02)

    def _configure(self) -> str:
        return (
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\njetstream {{ store_dir: '
            f'"{self.folder}" }}\n'
            f"{self.settings}\n"
        )

    def _move_here(self) -> str:
        places = {"0.0.0.0:4222": f"127.0.0.1:{self.port}", "/data": str(self.folder)}
        text = self.shipped.replace("/etc/nats", str(self.folder.parent))
        for there, here in places.items():
            assert text.count(there) == 1
            text = text.replace(there, here)
        return text

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def running_broker(folder: Path, settings: str = "", *, shipped: str = "") -> Iterator[Broker]:
    broker = Broker(folder, settings, shipped)
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
