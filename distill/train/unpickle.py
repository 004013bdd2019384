"""Read a training checkpoint without running code that it may contain.

A checkpoint's optimizer state is a pickle, and a pickle may call any function. These functions read
checkpoints:

    accelerate     `torch.load(weights_only=True)`
    DeepSpeed      `torch.load(weights_only=False)`
    FSDP           the same for everything that is not a tensor, and `pickle.load` for the file .metadata

Within `without_code`, all three build only tensors, numbers and the classes listed here, and refuse
everything else.
"""

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

_DCP = "torch.distributed.checkpoint"
METADATA = {
    *(
        (f"{_DCP}.metadata", name)
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
    ),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}
"""Names that FSDP's .metadata may contain, each with its module."""


@contextmanager
def without_code(checkpoint: Path, *, deepspeed: bool = False) -> Iterator[None]:
    """Load `checkpoint` inside this context without running code from it.

    `deepspeed` also allows DeepSpeed's classes.

    Raises:
        ValueError: the checkpoint contains anything else. The message names it, and none of its
            code was run.
    """
    # Set one and clear the other, because torch refuses to load with both set, and the user may
    # have set the second one.
    switches = {
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0",
    }  # for every torch.load
    before = {name: os.environ.get(name) for name in switches}
    os.environ.update(switches)
    # FSDP's reader calls `pickle.load` by this module-level name.
    known = vars(filesystem)["pickle"] = _KnownPickles()
    try:
        with torch.serialization.safe_globals(_list_deepspeed_classes() if deepspeed else []):
            yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        reasons = [*known.refused, *_find_refusals(error)]
        if not reasons:
            raise
        raise ValueError(
            f"{checkpoint} contains more than tensors and numbers and was not loaded: {reasons[0]}. "
            "It was modified, "
            "or written by another program: delete it to resume from the previous checkpoint"
        ) from error
    finally:
        vars(filesystem)["pickle"] = pickle
        os.environ.update({name: value for name, value in before.items() if value is not None})
        for name in (name for name, value in before.items() if value is None):
            del os.environ[name]


def _list_deepspeed_classes() -> list[Any]:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # an extra
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [
        LossScaler,
        DynamicLossScaler,
        ZeroStageEnum,
        fragment_address,
        (_find_member, "builtins.getattr"),
    ]


def _find_member(kind: Any, name: str) -> Any:
    """Return an enum member, which Python before 3.11.4 pickles as a call to getattr.

    This function replaces getattr when such a pickle is read.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return kind.__members__[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _find_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) not in METADATA and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _KnownPickles:
    """Replacement for the module `pickle` while FSDP reads .metadata.

    FSDP turns errors into text, so this class keeps the refusals.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []

    def load(self, file: Any) -> Any:
        try:
            return _Unpickler(file).load()
        except Exception as error:  # a damaged pickle may raise any exception
            self.refused.append(str(error) or type(error).__name__)
            raise


def _find_refusals(error: BaseException) -> Iterator[str]:
    """Return torch's reasons, one line each, without its advice on how to trust a file."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            yield from _find_refusals(failure)
    elif isinstance(error, pickle.UnpicklingError):
        named = re.search(r"(?:GLOBAL|it names) (\S+)", str(error))
        yield f"it names {named[1]}" if named else "it is not a pickle of a training run"
