"""Fetch the signal one batch ahead.

A server or a disk works on the next batch's signal while the draft trains on the current batch.

training     | step 1           | step 2           | step 3
teacher   1  | 2                | 3                | 4          a step takes the slower one's time
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from redraft.heads.draft import Batch, TargetSignal


class OneAhead:
    """A source of signals that can fetch a batch's signal before it is needed.

    The sources are in `distill.signal.sources`.
    """

    def __init__(self, source: Callable[[Batch], TargetSignal], device: torch.device) -> None:
        """Wrap `source`, which nothing else may use afterwards.

        `device` is the device of the batches.
        """
        self._source = source
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._flight: _Flight | None = None

    def start(self, batch: Batch) -> None:
        """Let a thread get the signal for this batch.

        The signal for an earlier batch that was never fetched is dropped.
        """
        if self._flight is not None:
            self._flight.thread.join()
        self._follow()
        self._flight = _Flight(batch, lambda: self._get(batch))

    def __call__(self, batch: Batch) -> TargetSignal:
        """Return the batch's signal; compute it now unless `start` was called with this batch.

        Any exception from the signal source is raised here.
        """
        flight = self._flight
        if flight is not None:
            flight.thread.join()  # only one thread at a time may use a source
        # A held-out batch may come in between. Its signal is fetched now, and the signal in flight
        # is kept for the next step.
        if flight is None or flight.batch is not batch:
            self._follow()
            signal = self._get(batch)
        else:
            self._flight = None
            signal = flight.take()
        if self._stream is not None:
            self._hand_over(signal)
        return signal

    def _follow(self) -> None:
        """Make the stream wait for the caller's, where the batch may still arrive (`to_device`)."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def _get(self, batch: Batch) -> TargetSignal:
        with self._on_stream():
            return self._source(batch)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:  # device and stream are set per thread
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                yield
                # This thread waits for the copies, so that the step need not.
                self._stream.synchronize()

    def _hand_over(self, signal: TargetSignal) -> None:
        """Keep the tensors' memory until the step's stream is done with them too."""
        for tensor in signal.tensors():
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class _Flight:
    def __init__(self, batch: Batch, get: Callable[[], TargetSignal]) -> None:
        self.batch, self._get = batch, get
        self._result: Future[TargetSignal] = Future()
        # Use a daemon thread, so that a finished run does not wait minutes for a dead server.
        self.thread = threading.Thread(target=self._fly, name="one batch ahead", daemon=True)
        self.thread.start()

    def _fly(self) -> None:
        try:
            self._result.set_result(self._get())
        except BaseException as error:
            # `take` raises it, in the step that needs the signal.
            self._result.set_exception(error)

    def take(self) -> TargetSignal:
        return self._result.result()
