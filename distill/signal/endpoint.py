"""A client for one OpenAI-compatible server, with limited concurrency and retries."""

import asyncio
from types import TracebackType
from typing import Any, Self

import httpx

from redraft.engine.proxies import describe_proxy, is_local_url, load_certificates
from redraft.engine.running_server import read_address, read_object
from redraft.files.printable import printable

# The server is overloaded or restarting. Retries do not help with other statuses.
RETRIED_STATUS = {408, 429, 500, 502, 503, 504}
TLS_FAULTS = {
    "CERTIFICATE_VERIFY_FAILED": "set SSL_CERT_FILE to a file with its certificate authority",
    "WRONG_VERSION_NUMBER": "it does not use TLS: give its address with http://",
}
"""Failures that retries do not fix, each with the remedy."""
LIST_TIMEOUT_S = 30  # timeout for the list of models, which a server returns at once


class RequestRefusedError(ValueError):
    """The server refused this request, so a retry would not help."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{url} answers HTTP {status}: {reason}")
        self.status, self.reason = status, reason


class RequestFailedError(ConnectionError):
    """The server answered each attempt with HTTP 500, possibly because of this request."""


class Endpoint:
    """Requests to one server, from one event loop."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        concurrency: int = 32,
        attempts: int = 8,
        backoff_s: float = 0.5,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """Set up the client without opening a connection.

        `url` may end with `/v1`, and `model` is the first in the server's list by default. The
        pause before the second attempt is `backoff_s`, and doubles with every further one.
        `timeout_s` limits a single attempt.

        Raises:
            ValueError: `url` is not an HTTP address, `concurrency` is less than 1, the
                certificates cannot be read, or no header can contain the key.
        """
        address = read_address(url)
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: it must be at least 1")
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError(
                "the API key (OPENAI_API_KEY) contains a line break or another character "
                "that is not allowed in a key"
            )
        # A password in the address is sent, but never shown.
        auth = (address.username, address.password) if address.userinfo else None
        url = str(address.copy_with(userinfo=b""))
        self.url = url.rstrip("/").removesuffix("/v1")
        self.attempts, self.backoff_s, self.concurrency = attempts, backoff_s, concurrency
        self._model, self._timeout_s = model, timeout_s
        # This comes in addition to httpx's limit, under which a request that waits for a connection
        # would use up `timeout_s`.
        self._slots = asyncio.Semaphore(concurrency)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency)
        self._client = httpx.AsyncClient(
            headers=headers,
            auth=auth,
            limits=limits,
            trust_env=not is_local_url(url),
            verify=load_certificates(url),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, *_: type[BaseException] | BaseException | TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Return the name of the model.

        Raises:
            RequestRefusedError: the server lists no model.
        """
        if self._model is None:
            listed = await self._request("GET", "/v1/models")
            try:
                names = [str(model["id"]) for model in listed["data"]]
                self._model = names[0]
            except (LookupError, TypeError):
                url = f"{self.url}/v1/models"
                raise RequestRefusedError(
                    url, 200, "it lists no model: set one with redraft regenerate --model"
                ) from None
            if len(names) > 1:
                print(f"{self.url} lists {len(names):,} models: uses {self._model}", flush=True)
        return self._model

    async def is_back(self, timeout_s: float) -> bool:
        """Whether the server answers within `timeout_s` and still lists the same model."""
        try:
            listed = await asyncio.wait_for(self._request("GET", "/v1/models"), timeout_s)
            return self._model in {None, *(model["id"] for model in listed["data"])}
        # While a server starts, a proxy may answer instead: with an error, without a model, or not
        # in JSON.
        except (OSError, ValueError, LookupError, TypeError):
            return False

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the server's answer to a request for the model.

        Raises:
            RequestRefusedError: the server refuses this request.
            ConnectionError: after `attempts` tries, or if the server has no such API or no valid
                certificate; the message names the URL. It is a `RequestFailedError` if each try
                ended with HTTP 500.
        """
        return await self._request("POST", path, {"model": await self.model(), **body})

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        url, failure, statuses = self.url + path, "", set[int]()
        for attempt in range(self.attempts):
            if attempt:
                # The pause does not occupy a slot, so other requests continue.
                await asyncio.sleep(self.backoff_s * 2 ** (attempt - 1))
            try:
                async with self._slots:
                    response = await self._client.request(
                        method, url, json=body, timeout=self._timeout_s if body else LIST_TIMEOUT_S
                    )
            except httpx.TransportError as error:
                failure = str(error) or type(error).__name__
                statuses.add(0)
                for name, cure in TLS_FAULTS.items():
                    if name in failure:
                        raise ConnectionError(f"{url}: {failure}; {cure}") from None
                continue
            answer, status = read_object(response), response.status_code
            if response.is_success:
                if answer is None:
                    kind = response.headers.get("content-type", "something else")
                    raise ConnectionError(
                        f"{url} answers with {kind}, not a JSON object: it has no "
                        "OpenAI-compatible API"
                    )
                # Gateways return the error of a server behind them with status 200.
                refusal = answer.get("error")
                if not refusal:
                    return answer
                code = refusal.get("code") if isinstance(refusal, dict) else None
                status = code if isinstance(code, int) else status
            if status not in RETRIED_STATUS:
                raise RequestRefusedError(url, status, _reason(response))
            failure = f"HTTP {status}: {_reason(response)}"
            statuses.add(status)
        tries = f" in {self.attempts} tries" if self.attempts > 1 else ""
        error_type = RequestFailedError if statuses == {500} else ConnectionError
        raise error_type(f"{url} did not answer{tries} ({failure}{describe_proxy(url)})")


def _reason(response: httpx.Response) -> str:
    if place := response.headers.get("location"):
        return f"it redirects to {printable(place)}: give the address without a redirect"
    try:
        said = response.json()
        said = said.get("error") or said
        text = said if isinstance(said, str) else str(said.get("message") or said)
    except (ValueError, AttributeError):
        text = response.text
    return printable((text.strip().splitlines() or [response.reason_phrase])[0][:300])
