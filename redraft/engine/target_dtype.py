"""The dtype in which a target computes, if the user sets none.

    on a GPU                                                     as stored
    on a CPU, quantised                                          as stored: only servers run it
    on a CPU with AMX or AVX-512, stored in bfloat16             bfloat16: half the memory
    on any other CPU, or stored in a different dtype            float32: outputs are compared token for token

Training, forecast, engine and `redraft serve` all use this default, so a draft is trained on the
numbers that it will be served with. This module imports neither torch nor vLLM.
"""

from pathlib import Path

from redraft.engine.hardware import Machine, this_machine
from redraft.files.target_folder import TargetDtype as TargetDtype
from redraft.files.target_folder import TargetFolder


def open_target(
    name_or_path: str | Path,
    dtype: TargetDtype | None = None,
    *,
    on_cpu: bool,
    machine: Machine | None = None,
) -> TargetFolder:
    """Open a target that computes in `dtype` or the default.

    Raises the same errors as `TargetFolder.open`.
    """
    target = TargetFolder.open(name_or_path)
    if dtype is None and on_cpu:
        dtype = target.choose_cpu_dtype(lambda: (machine or this_machine()).cpu_has_bfloat16)
    return target.in_dtype(dtype)


def default_target_dtype(
    target: str | Path | TargetFolder, *, on_cpu: bool, machine: Machine | None = None
) -> TargetDtype | None:
    """Return the default dtype for a target, which may be opened or only named.

    None means the stored dtype.
    """
    if not on_cpu:
        return None
    try:
        opened = target if isinstance(target, TargetFolder) else TargetFolder.open(target)
        return opened.choose_cpu_dtype(lambda: (machine or this_machine()).cpu_has_bfloat16)
    except (OSError, ValueError):  # loading reports it
        return "float32"
