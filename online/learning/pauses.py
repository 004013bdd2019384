"""Pauses of a learner that computes on its servers' cores or GPU.

    micro-step ─► are requests running? ─► wait until none is, or for LONGEST times the micro-step

On a CPU, nice levels are not enough, because the learner would still share caches and memory
bandwidth with a server. A GPU gives two processes equal shares of its time.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import httpx

from redraft.engine.proxies import load_certificates

LONGEST = 3.0
"""Longest pause, as a multiple of the preceding computation. Next to servers that are never idle,
the learner then computes for a quarter of the time.
"""

POLL_S = 0.1


class Pauses:
    """Pauses while servers run requests. For use from the thread that computes."""

    def __init__(self, list_urls: Callable[[], Sequence[str]]) -> None:
        self.list_urls = list_urls
        self._http = httpx.Client(timeout=1.0, trust_env=False, verify=load_certificates("https:"))
        self._since = time.monotonic(), time.process_time()

    def wait(self) -> float:
        """Wait while a server runs requests, up to LONGEST times the preceding computation.

        Return the seconds waited.
        """
        began_s = now_s = time.monotonic()
        # The CPU time covers all threads; wall time would include the wait for records. The thread
        # that waits for a GPU spins, so it counts too.
        computed_s = min(began_s - self._since[0], time.process_time() - self._since[1])
        longest_s = LONGEST * computed_s
        while now_s - began_s < longest_s and any(map(self._is_busy, self.list_urls())):
            time.sleep(POLL_S)
            now_s = time.monotonic()
        self._since = now_s, time.process_time()
        return now_s - began_s

    def _is_busy(self, url: str) -> bool:
        # This is counted with --enable-server-load-tracking, and always 0 without it. /metrics is
        # not used, because writing that page takes the server as long as a step.
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            return bool(self._http.get(f"{url}/load").json()["server_load"])
        return False  # the server is starting, or is gone
