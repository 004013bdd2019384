"""The part of a backend that compiles: it only has to exist."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget


class Backend(BaseBackend):
    binary_ext = "none"

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> Any:
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}
