"""The origin of a request, from its headers to the worker.

client headers ─► OriginMiddleware ─► context variable ─► engine_client.generate ─► SamplingParams.extra_args
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers

from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin, read_origin_headers

_origin: ContextVar[Origin] = ContextVar("redraft_origin")


class OriginMiddleware:
    """Stores the X-Redraft-Tenant, -Domain and -Opt-Out headers of a request for `forward_origin`."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            _origin.set(read_origin_headers(Headers(scope=scope)))
        await self.app(scope, receive, send)


def forward_origin(engine_client: Any) -> None:
    """Make `engine_client.generate` write the origin into the sampling parameters, over any value from the client."""
    generate = engine_client.generate

    def generate_with_origin(prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        origin = {EXTRA_ARGS_KEY: _origin.get(Origin())._asdict()}
        sampling_params.extra_args = (sampling_params.extra_args or {}) | origin
        return generate(prompt, sampling_params, *args, **kwargs)

    engine_client.generate = generate_with_origin
