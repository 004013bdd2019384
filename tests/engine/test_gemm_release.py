"""A handle of oneDNN that is collected while torch traces."""

from __future__ import annotations

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from redraft.engine.patches import release_outside_traces


class Handle:
    """As vLLM's: the address is a tensor, so that no trace bakes it in."""

    def __init__(self, released: list[int]) -> None:
        self.handler_tensor, self.released = torch.tensor(1 << 40), released

    def release(self) -> None:
        self.released.append(int(self.handler_tensor.item()))


def test_a_handle_is_released_while_torch_traces() -> None:
    released: list[int] = []
    handle = Handle(released)
    with FakeTensorMode(), enable_python_dispatcher():
        with pytest.raises((AssertionError, RuntimeError)):
            Handle.release(handle)
        release_outside_traces(Handle.release)(handle)
        assert isinstance(torch.ones(2), torch._subclasses.FakeTensor), "the trace continues"
    assert released == [1 << 40]


def test_a_handle_is_released_while_a_fake_tensor_is_computed() -> None:
    released: list[int] = []
    handle = Handle(released)
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        with pytest.raises(RuntimeError):
            Handle.release(handle)
        release_outside_traces(Handle.release)(handle)
        assert torch._C._meta_in_tls_dispatch_include(), "the kernel continues"
    assert released == [1 << 40]
    assert not torch._C._meta_in_tls_dispatch_include()


def test_a_copy_without_an_address_is_dropped() -> None:
    released: list[int] = []
    handle = Handle(released)
    fake = FakeTensorMode().from_tensor(handle.handler_tensor)
    for copy in (handle.handler_tensor.to("meta"), fake, None):
        handle.handler_tensor = copy
        release_outside_traces(Handle.release)(handle)
    assert released == []
