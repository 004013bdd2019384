"""Weights from files by the update of vLLM, on any device.

`--weight-transfer-config '{"backend": "redraft"}'`.

    start_weight_update, or start_draft_weight_update
    update_weights {"path": FILE or FOLDER}      safetensors, e.g. in /dev/shm; as often as there are parts
    finish_weight_update                         reads and loads all parts: until then the old weights stay

An update of a draft, by any backend, is loaded at the end as in a swap: without modules shared with
the target.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from redraft.online.engine.swap import load_draft, read_tensors


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Part(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str


class Files(WeightTransferEngine[Nothing, Part]):  # type: ignore[misc]
    init_info_cls, update_info_cls = Nothing, Part
    worker: Any = None  # `install` sets it

    def init_transfer_engine(self, init_info: Nothing) -> None: ...

    def shutdown(self) -> None: ...

    def start_weight_update(self) -> None:
        self.files: list[Path] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(
            self.parse_update_info(update_info)
        )  # the one of vLLM waits for an accelerator

    def receive_weights(self, update_info: Part) -> None:
        path = Path(update_info.path)
        found = sorted(path.glob("*.safetensors")) or [path]
        for file in found:
            with safe_open(file, "pt"):
                # a file that is missing or torn ends the update here, and the old weights stay
                pass
        self.files += found

    def finish_weight_update(self) -> None:
        try:
            if self.model is self._default_model:
                parts = (part for file in self.files for part in read_tensors([file]).items())
                self.worker.reload_weights(weights_iterator=parts)
            else:
                load_draft(self.worker, read_tensors(self.files))
        except BaseException:
            # as vLLM does after a failed part: else it would refuse the next update
            self.worker._weight_update_active = False
            self.reset_weight_update_target()
            raise
