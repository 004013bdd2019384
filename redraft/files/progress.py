"""Progress bars: a moving bar in a terminal, and occasional lines in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm

LOG_INTERVAL_S = 10.0  # minimum time between two lines for one bar in a log


class Progress(tqdm):  # type: ignore[misc]
    """tqdm bars. Without a terminal, they write a line at most every `LOG_INTERVAL_S`.

    A bar that finishes sooner writes nothing. A longer one also writes its final state.
    """

    disable: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Set before tqdm's constructor, which already draws the bar.
        self._is_log = not (kwargs.get("file") or sys.stderr).isatty()
        self._last_line_s = time.monotonic()
        self._has_line = False
        if self._is_log:
            kwargs["ncols"] = 0  # numbers without the bar
        super().__init__(*args, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar. In a log, write a line if the last line is old enough."""
        if not self._is_log:
            super().display(msg, pos)
        elif time.monotonic() - self._last_line_s >= LOG_INTERVAL_S:
            self._write_line()

    def clear(self, nolock: bool = False) -> None:
        """Remove the bar from the screen before other text is written. In a log, do nothing."""
        if not self._is_log:
            super().clear(nolock)

    def close(self) -> None:
        if not self._is_log:
            super().close()
            return
        if self.disable:  # needed on the second call too
            return
        self.disable = True
        self._decr_instances(self)
        if self._has_line:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line_s, self._has_line = time.monotonic(), True
        self.fp.write(f"{str(self).strip()}\n")
        self.fp.flush()
