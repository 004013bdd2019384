"""A connector that runs inside vLLM.

It writes the hidden states collected by `extract_hidden_states` to the trainers' storage.

vLLM's own connector writes to a local disk, in a format without layer numbers, and can copy only
with CUDA streams. vLLM imports this module by name (`features.server_args`); nothing else imports
it.
"""

import time
from concurrent.futures import Future
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.v1.request import RequestStatus

from redraft.distill.signal.features_store import Leftovers, write_states
from redraft.files.folder import loaded_folder
from redraft.files.target_folder import TARGET_VERSION, TargetFolder

COPY_POLL_S = 0.001  # Seconds between two checks of a copy from the GPU.


class Connector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """vLLM's connector with a different destination, and with support for copies on the CPU."""

    @cached_property
    def _leftovers(self) -> Leftovers:
        return Leftovers()

    def _url(self, filename: str) -> str:
        """Return the URL of the states. vLLM derives `filename` from the request's id."""
        storage: str = self._kv_transfer_config.get_from_extra_config("storage", "")
        # E.g. ./cmpl-1.safetensors becomes the storage's URL followed by cmpl-1.
        return f"{storage.rstrip('/')}/{PurePath(filename).stem}"

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        # No client is waiting for the states any longer.
        if request.status == RequestStatus.FINISHED_ABORTED:
            self._request_filenames.pop(request.request_id, None)
            self._pending_saves.pop(request.request_id, None)
            return False, None
        delays, answer = super().request_finished(request, block_ids)
        return delays, answer and {"hidden_states": self._url(answer["hidden_states_path"])}

    # vLLM's is a static method, but it is called as `self._write_tensors`, so a method can replace
    # it.
    def _write_tensors(
        self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: None
    ) -> None:
        # Poll, because `synchronize` of vLLM's event would spin in every writing thread.
        while not event.query():
            time.sleep(COPY_POLL_S)
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        states_format = self._kv_transfer_config.get_from_extra_config("format", "exact")
        layers = config.eagle_aux_hidden_state_layer_ids
        version = self._vllm_config.additional_config.get(TARGET_VERSION, "")
        target = (*self._target, version)
        write_states(self._url(filename), tensors["hidden_states"], layers, states_format, target)

    @cached_property
    def _target(self) -> tuple[str, str]:
        """Return lineage and fingerprint of the target; empty if its files cannot be read here."""
        served = self._vllm_config.model_config
        try:
            target = TargetFolder(name=served.model, folder=loaded_folder(served))
            return target.lineage, target.fingerprint
        except (OSError, ValueError):
            return "", ""

    def _submit_async_write(self, pending: Any) -> None:
        # All ranks have the same states, and only one writes them, as in vLLM's method.
        if not self._is_tp_rank_zero:
            return
        self._leftovers.note(self._url(pending.filename))
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        # E.g. block 3 of 16 slots has slots 48 to 63. `extract_from_kv_cache` drops the unused
        # slots of the last block.
        slots = (blocks + torch.arange(self._block_size)).flatten()
        # Copy, because vLLM may reuse the blocks while the thread writes.
        states_TLD = extract_from_kv_cache(
            self._kv_cache, slots, len(pending.token_ids)
        ).contiguous()
        written: Future[None] = self._executor.submit(
            self._write_tensors, {"hidden_states": states_TLD}, _COPIED, pending.filename, None
        )
        # Set this before the callback, which removes the future again.
        self._req_copy_events[pending.req_id] = _COPIED
        self._req_futures[pending.req_id] = written
        written.add_done_callback(lambda future: self._on_write_done(pending.req_id, future))


class _Copied:
    """Replacement for a CUDA event whose copy is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_COPIED = _Copied()
