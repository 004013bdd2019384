"""Load weights from files with vLLM's weight update, on any device.

It needs `--weight-transfer-config '{"backend": "redraft"}'`.

    start_weight_update, or start_draft_weight_update
    update_weights {"path": FILE or FOLDER}      safetensors within --targets or the registry, such as
                                                 a folder in /dev/shm; as often as there are parts
    finish_weight_update                         checks and loads all parts

An update that is incomplete, has different shapes or dtypes, or has non-finite values is refused
before anything is loaded. An update of a draft, by any backend, is loaded at the end as in a swap:
without the modules that are shared with the target.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from redraft.files.artifact import safetensors_header
from redraft.online.engine.swap import is_finite, load_draft, shared_modules
from redraft.online.engine.trainer_files import describe_tensors, list_files, require_whole


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    pass


@dataclass
class Part(WeightTransferUpdateInfo):  # type: ignore[misc]
    path: str


class Files(WeightTransferEngine[Nothing, Part]):  # type: ignore[misc]
    init_info_cls, update_info_cls = Nothing, Part
    worker: Any = None  # set by `watch_pushes`, like `roots`
    roots: Sequence[Path] = ()

    def init_transfer_engine(self, init_info: Nothing) -> None: ...

    def shutdown(self) -> None: ...

    def start_weight_update(self) -> None:
        self.files: list[Path] = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(
            self.parse_update_info(update_info)
        )  # vLLM's own method waits for an accelerator

    def receive_weights(self, update_info: Part) -> None:
        files = list_files(Path(update_info.path), self.roots)
        found = [file for file in files if file.suffix == ".safetensors"] or files
        for file in found:
            # A missing or truncated file ends the update here, and the old weights stay in place.
            safetensors_header(file)
        self.files += found

    def finish_weight_update(self) -> None:
        try:
            found = describe_tensors(self.files)
            if self.model is self._default_model:
                require_whole(found, self.worker.redraft.target_tensors or found)
                for name, tensor in self._read():
                    _require_finite(name, tensor)
                self.worker.reload_weights(weights_iterator=self._read())
            else:
                self._load_draft(found)
        except BaseException:
            # Clean up like vLLM after a failed part; otherwise, it would refuse the next update.
            self.worker._weight_update_active = False
            self.reset_weight_update_target()
            raise

    def _load_draft(self, found: dict[str, str]) -> None:
        if (layout := self.worker.redraft.draft) is not None:
            runner = self.worker.model_runner
            shared = shared_modules(runner.get_draft_model(), runner.get_model())
            brought, wanted = (
                {name: text for name, text in each.items() if shared.isdisjoint(name.split("."))}
                for each in (found, layout.tensors)
            )
            require_whole(brought, wanted)
        tensors = dict(self._read())
        for name, tensor in tensors.items():
            _require_finite(name, tensor)
        load_draft(self.worker, tensors)

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors file by file.

        If several tensors have the same name, the last one counts.
        """
        places = {name: file for file in self.files for name in safetensors_header(file)}
        for file in dict.fromkeys(self.files):
            for name, tensor in load_file(file).items():
                if places[name] == file:
                    yield name, tensor


def _require_finite(name: str, tensor: Tensor) -> None:
    if not is_finite(tensor):
        raise ValueError(f"{name} has non-finite values: the old weights are kept")
