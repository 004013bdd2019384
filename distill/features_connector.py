"""Runs inside vLLM: writes the hidden states that `extract_hidden_states` collects, one file a request.

vLLM's own connector, whose files do not say which layers they hold, and which copies by CUDA streams alone. vLLM loads
this module by name (`server_args` of `distill.features`); nothing here imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Connector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        layers = torch.tensor(config.eagle_aux_hidden_state_layer_ids)
        ExampleHiddenStatesConnector._write_tensors({**tensors, "layers": layers}, event, filename, lock_fd)

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states_TLD = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).contiguous()
        tensors = {"hidden_states": states_TLD, "token_ids": pending.token_ids}
        # at once: the copy above is the work, and what is written is in memory already
        self._write_tensors(tensors, _COPIED, pending.filename, self._lock_fds.pop(pending.req_id, None))
        self._req_copy_events[pending.req_id] = _COPIED


class _Copied:
    """What a CUDA event says when its copy is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_COPIED = _Copied()
