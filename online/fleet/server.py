"""The servers of a fleet: read status and counters, and swap all servers to one version.

A server that does not answer is treated differently from a server that refuses. A server that does
not answer may be restarting, and comes back with the draft given on its command line, so it is
tried again, by `reconcile` for as long as the learner runs. A server that refuses has kept the last
good draft and will refuse again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args

import httpx
import msgspec

from redraft.engine.counters import SPEC_DECODE, find_counts, read_samples
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.proxies import load_certificates
from redraft.engine.running_server import read_address
from redraft.files.printable import printable
from redraft.online.fleet.reach import explain, explain_answer
from redraft.online.fleet.registry import Identity, Registry
from redraft.online.journal import Identifier

STATUS_TIMEOUT_S = 10.0
"""Deadline for a whole poll of a server, in seconds. It is generous, because a swap in progress
delays the response by a fraction of a second.
"""

SWAP_TIMEOUT_S = 300.0
"""Deadline for a whole swap. It is generous, because a server may take minutes to read and check a
large draft from a shared disk. The server itself gives up earlier, with status 504. Cancelling the
request does not stop the swap.
"""

METRICS_TIMEOUT_S = 1.0
"""Deadline for reading the counters. Nothing depends on one reading, because the next one covers
the same time.
"""

KEEP_ALIVE_S = 2.0
"""Maximum time in seconds for which an idle connection is used again. vLLM closes it after 5 s,
which is also the default of httpx, and a request that is sent just then is lost.
"""

GENERATED = "vllm:generation_tokens_total"
COUNTERS = (SPEC_DECODE, GENERATED)
AT_LOAD = "\n"  # Separates a domain from a load. No header can contain this character.
MAX_COUNTER_LINES = 4096
MAX_ANSWER_BYTES = 8 << 20  # Maximum size of a response that is read.
MAX_QUOTED = 300  # maximum number of characters quoted from a server in an error
MAX_COUNTER = 1 << 53  # larger counters are invalid, because a float cannot represent them exactly
MAX_POSITIONS = 256
MAX_PACE_CHARS = 400  # Maximum length of a server's line about its pace.
# Maximum number of domains whose counters are read from a server. A real server counts at most 33.
MAX_DOMAINS = 64
MAX_LOADS = 40  # Maximum number of load buckets read for a domain: up to 2^20 requests.
CURES = {
    401: ". Give the learner the token in the server's token file",
    404: ". Start it with redraft serve",
}
"""Remedies for errors that the server itself returns, by status code."""
ALARM_SHARE = 0.05
"""A draft whose first tokens are accepted less often than this is useless: its weights are wrong,
or it was made for a different target. Only first tokens count, because on a busy server adaptive
verification omits later ones.
"""

# Minimum number of drafts before ALARM_SHARE applies, so that a share of 0.5 causes no false alarm.
ALARM_DRAFTS = 200


CAPTURE_DROP_REASONS = {
    "dropped_steps_queue_full": "queue_full",
    "steps_without_rows_queue_full": "queue_full_rows",
    "broken_requests_gap": "broken",
    "broken_requests_target_unclear": "target_unclear",
    "dropped_records_spool": "spool_full",
    "evicted_files_spool_budget": "spool_evicted",
    "dropped_records_broker": "log_silent",
    "dropped_records_too_large": "too_large",
    **{
        f"skipped_requests_{reason}": reason
        for reason in (
            "watermark",
            "forced_tokens",
            "logit_bias",
            "custom_arguments",
            "multimodal",
            "unmarked",
        )
    },
}
"""Capture's counters of records that are lost before they reach the learner, and of requests that
it cannot record, with the learner's reason for each.
"""


def require_address(url: str) -> None:
    """Raise ValueError unless `url` can be the address of a server, and contains no password."""
    address = read_address(url)
    if address.userinfo:
        raise ValueError(
            f"the address of {address.host!r} contains a password, which pages would show: remove it"
        )
    if any(map(str.isspace, url)) or len(url) > 200:  # it becomes an identifier of the journal
        raise ValueError(
            f"{url!r} is not the address of a server: it has spaces or over 200 characters"
        )


class UnreachableError(Exception):
    """The server did not respond."""


class RefusedError(Exception):
    """The server responded with an error."""


class NonsenseError(RefusedError):
    """The response is malformed, or its values are impossible."""


SampleMethod = Literal["greedy", "probabilistic"]


Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNTER)]


_Domain = Annotated[str, msgspec.Meta(max_length=64)]
_Positions = Annotated[tuple[tuple[Count, Count], ...], msgspec.Meta(max_length=MAX_POSITIONS)]
_Load = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}\Z")]
_OfLoad = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=1 + MAX_POSITIONS)]
_OfLoads = Annotated[dict[_Load, _OfLoad], msgspec.Meta(max_length=MAX_LOADS)]


class Served(NamedTuple):
    """The engine's own counters since it started."""

    counts: AcceptanceCounts
    """Acceptance counts of all proposers."""
    tokens: float
    """Number of generated tokens."""
    time_s: float
    """Time of the measurement, on the monotonic clock."""

    def since(self, first: Served) -> Served | None:
        """Return the counts and seconds since an earlier reading; None if a count has decreased."""
        counts = self.counts.since(first.counts)
        if counts is None or self.tokens < first.tokens:
            return None
        return Served(counts, self.tokens - first.tokens, self.time_s - first.time_s)


class _PaceAnswer(msgspec.Struct, frozen=True):
    line: Annotated[str, msgspec.Meta(pattern=r"^[ -~]*\Z", max_length=MAX_PACE_CHARS)]


class _ForgetAnswer(msgspec.Struct, frozen=True):
    live_runs: Count


class _StatusAnswer(msgspec.Struct, frozen=True):
    """The fields in use from the response body of GET /redraft/status."""

    server_id: Identifier
    draft_version: Annotated[str, msgspec.Meta(pattern=r"^[!-~]*\Z", max_length=200)]
    draft_intact: bool
    target_intact: bool
    target_fingerprint: Identifier
    target_version: Annotated[str, msgspec.Meta(pattern=r"^[!-~]*\Z", max_length=200)] | None = ""
    capture: dict[str, Any] | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITIONS)] = 0
    draft_sample_method: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    manifest_sha256: Annotated[str, msgspec.Meta(max_length=64)] = ""
    capture_off: str = ""
    swap_off: str = ""
    pace: _PaceAnswer | None = None
    notes: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=400)], ...], msgspec.Meta(max_length=16)
    ] = ()
    drafts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=2 + MAX_POSITIONS)] = ()
    """Number of drafts, number of draft tokens and, for each position, number of drafts whose token
    at that position was accepted.
    """
    positions: Annotated[dict[_Domain, _Positions], msgspec.Meta(max_length=MAX_DOMAINS)] = {}
    """Tokens tried and accepted, by domain and position. Earlier releases do not send this field.
    """
    loads: Annotated[dict[_Domain, _OfLoads], msgspec.Meta(max_length=MAX_DOMAINS)] = {}
    """With adaptive verification, the numbers of drafts and of accepted tokens at each position,
    for each domain and load.
    """


_status_decoder = msgspec.json.Decoder(_StatusAnswer)


@dataclass(frozen=True, order=True)
class Drafting:
    """How a server drafts."""

    num_speculative_tokens: int
    draft_sample_method: SampleMethod

    def __str__(self) -> str:
        return f"{self.num_speculative_tokens} draft tokens, {self.draft_sample_method}"


@dataclass(frozen=True, kw_only=True)
class Status:
    """The response to GET /redraft/status."""

    boot: str
    """Id of this run of the server; changes at every start."""
    draft_version: str
    is_intact: bool
    """Whether draft and target are unchanged since they were loaded, on all ranks."""
    target_fingerprint: str
    target_version: str | None = ""
    """LABEL@DIGEST; "" for the initial weights, None during an update."""
    drafting: Drafting | None = None
    """Draft settings; None if the server has no draft."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Number of records lost by capture, by reason."""
    manifest_sha256: str = ""
    """Hash of the draft's manifest; empty if there is none."""
    capture_off: str = ""
    """Why the server records nothing although recording is configured; empty otherwise."""
    swap_off: str = ""
    """Why drafts cannot be swapped; empty if they can."""
    notes: Sequence[str] = ()
    """Server flags that are probably mistakes."""
    pace: str = ""
    """Draft tokens by batch size, for a server that chooses them at run time."""
    total: AcceptanceCounts | None = None
    """Acceptance since startup, excluding lookups; None if there is no draft."""
    by_domain: Mapping[str, AcceptanceCounts] = field(default_factory=dict)
    """Acceptance by domain."""
    by_load: Mapping[str, AcceptanceCounts] = field(default_factory=dict)
    """With adaptive verification, acceptance of all drafts by domain and load. Tokens that were not
    verified count as rejected, because this is the acceptance that users get at that load.
    """

    @property
    def is_paced(self) -> bool:
        return is_paced(self.pace)

    @property
    def target(self) -> str | None:
        """Digest of the target's weights; equal to `target_version` if it contains no digest."""
        return self.target_version and self.target_version.rpartition("@")[2]

    def since(self, first: Status) -> AcceptanceCounts | None:
        """Return the draft's counts since an earlier status.

        None unless both statuses have counts and come from the same boot and draft version.
        """
        if self.total is None or first.total is None:
            return None
        if (self.boot, self.draft_version) != (first.boot, first.draft_version):
            return None
        return self.total.since(first.total)


@dataclass(unsafe_hash=True)
class FleetServer:
    """One vLLM server with the plugin. Two objects with the same address are equal."""

    url: str
    token: str = field(repr=False, compare=False)
    """Bearer token, which may change while the server is in use."""
    http: httpx.AsyncClient = field(repr=False, compare=False)
    """One client per server. httpx iterates over all connections of a client at every request, so
    with a shared client, the cost would grow with the square of the number of servers.
    """

    registry: Registry | None = field(default=None, repr=False, compare=False, kw_only=True)
    """Registry whose versions the server should run. With None, versions are identified by name
    only.
    """

    answered_s: float = field(
        default_factory=time.monotonic, repr=False, compare=False, kw_only=True
    )
    """Time of the last response on the monotonic clock; before it, the time at which this object
    was made.
    """

    async def status(self) -> Status:
        """Request the server's current status.

        Raises:
            UnreachableError, RefusedError
        """
        content = await self._request("GET", "/redraft/status", STATUS_TIMEOUT_S)
        try:
            body = _status_decoder.decode(content)
            by_domain = {
                printable(name): _read_positions(pairs) for name, pairs in body.positions.items()
            }
            return Status(
                boot=body.server_id,
                draft_version=body.draft_version,
                is_intact=body.draft_intact and body.target_intact,
                target_fingerprint=body.target_fingerprint,
                target_version=body.target_version,
                drafting=_read_drafting(body),
                lost=_count_lost(body.capture or {}),
                manifest_sha256=body.manifest_sha256,
                capture_off=printable(body.capture_off),
                swap_off=printable(body.swap_off),
                notes=tuple(map(printable, body.notes)),
                pace=body.pace.line if body.pace else "",
                total=_read_total(body, by_domain) if body.draft_version else None,
                by_domain=by_domain,
                by_load={
                    f"{printable(name)}{AT_LOAD}{load}": _read_load(of_load)
                    for name, of_loads in body.loads.items()
                    for load, of_load in of_loads.items()
                },
            )
        except (
            ValueError,
            RecursionError,
        ) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            raise NonsenseError(f"{self.url} did not return a status: {error}") from error

    async def served(self) -> Served | None:
        """Read the engine's own counters, including lookups; None if they cannot be read."""
        try:
            page = (await self._request("GET", "/metrics", METRICS_TIMEOUT_S)).decode()
            lines = [line for line in page.splitlines() if line.startswith(COUNTERS)]
            if len(lines) > MAX_COUNTER_LINES or max(map(len, lines), default=0) > 1000:
                return None  # parsed on the event loop, so the size is limited
            counters = "\n".join(lines)
            counts = find_counts(counters)
            tokens = sum(sample.value for sample in read_samples(counters, GENERATED))
        except Exception:  # nothing depends on them
            return None
        is_number = math.isfinite(tokens) and 0 <= tokens <= MAX_COUNTER
        return Served(counts, tokens, time.monotonic()) if counts and is_number else None

    async def swap(self, version: str) -> None:
        """Ask the server to swap, and return once it serves `version`.

        After an error, the swap may still have happened, or may happen later.

        Raises:
            UnreachableError: the server does not answer.
            RefusedError: it keeps the old draft.
        """
        identity = self._identify(version)
        body = {
            "version": version,
            "manifest_sha256": identity.manifest_sha256,
            "registry": identity.registry,
        }
        await self._request(
            "POST",
            "/redraft/swap",
            SWAP_TIMEOUT_S,
            json={key: body[key] for key in body if body[key]},
        )

    async def forget(self, tenant: str) -> int:
        """Delete a tenant's text from the live counts, and return the number of deleted runs.

        Raises:
            UnreachableError, RefusedError: the server may keep the text until it exits.
        """
        content = await self._request(
            "POST", "/redraft/forget", STATUS_TIMEOUT_S, json={"tenant": tenant}
        )
        try:
            return msgspec.json.decode(content, type=_ForgetAnswer).live_runs
        except (ValueError, RecursionError) as error:
            raise NonsenseError(f"{self.url} did not return a number of runs: {error}") from error

    def serves(self, status: Status, version: str) -> bool:
        """Whether a server with this status serves `version` intact.

        The name must match, and so must the bytes if their hash is known on both sides.
        """
        if status.draft_version != version or not status.is_intact:
            return False
        wanted = self._identify(version).manifest_sha256
        # A hash that is unknown on one side does not prove that the bytes differ.
        return not (wanted and status.manifest_sha256) or wanted == status.manifest_sha256

    def _identify(self, version: str) -> Identity:
        return self.registry.identify(version) if self.registry else Identity()

    async def _request(
        self, method: str, path: str, timeout_s: float, json: object = None
    ) -> bytes:
        """Return the response body, which must arrive completely within `timeout_s`."""
        authorization = {"Authorization": f"Bearer {self.token}"}
        try:
            # httpx's timeouts apply between two bytes, so a server that sends slowly would never
            # reach them.
            async with asyncio.timeout(timeout_s):
                code, content, foreign = await self._exchange(method, path, json, authorization)
        except TimeoutError as error:
            raise UnreachableError(
                f"{self.url} did not answer {method} {path} within {timeout_s:.0f} s"
            ) from error
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"{self.url} does not answer: {self._quote(explain(error))}"
            ) from error
        except NonsenseError:
            self.answered_s = time.monotonic()
            raise
        # A malformed header can raise any exception; report it as the server's error.
        except Exception as error:
            reason = self._quote(repr(error))
            raise UnreachableError(f"{self.url} sent an invalid response: {reason}") from error
        self.answered_s = time.monotonic()
        if code != 200 or foreign:
            reason = foreign or self._quote(content.decode(errors="replace"))
            cure = "" if foreign else CURES.get(code, "")
            raise RefusedError(f"{self.url} answers {method} {path} with {code}: {reason}{cure}")
        return content

    def _quote(self, words: str) -> str:
        """Return the beginning of a server's message, printable and without our token.

        An error page may echo the request's headers, which contain the token.
        """
        words = words.replace(self.token, "***") if self.token else words
        return printable(words[:MAX_QUOTED])

    async def _exchange(
        self, method: str, path: str, json: object, headers: dict[str, str]
    ) -> tuple[int, bytes, str]:
        """Return the response's status and body, and why it does not come from the server itself.

        The reason is empty if the response comes from the server itself.
        """
        plain = {"Accept-Encoding": "identity"}  # a few compressed kB could decompress to GB
        content = bytearray()
        # httpx's default of 5 s between two bytes would end a slow swap. `_request` has the
        # deadline.
        async with self.http.stream(
            method, self.url + path, json=json, headers=plain | headers, timeout=SWAP_TIMEOUT_S
        ) as answer:
            async for part in answer.aiter_raw():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise NonsenseError(
                        f"{self.url} answered {path} with more than {MAX_ANSWER_BYTES >> 20} MiB"
                    )
        return (
            answer.status_code,
            bytes(content),
            explain_answer(answer.status_code, answer.headers.raw),
        )


def _read_drafting(body: _StatusAnswer) -> Drafting | None:
    methods = [method for method in get_args(SampleMethod) if method == body.draft_sample_method]
    return (
        Drafting(body.num_speculative_tokens, methods[0])
        if methods and body.num_speculative_tokens
        else None
    )


def _read_total(
    body: _StatusAnswer, by_domain: Mapping[str, AcceptanceCounts]
) -> AcceptanceCounts | None:
    if by_domain or len(body.drafts) < 2:
        return sum(by_domain.values(), AcceptanceCounts.zero()) if by_domain else None
    # If nothing was drafted yet, or by an earlier release, treat all drafts as equally long.
    num_drafts, _, *accepted = body.drafts
    return _read_positions([*zip((num_drafts, *accepted), accepted or [0], strict=False)])


def _read_load(of_load: Sequence[int]) -> AcceptanceCounts:
    num_drafts, *accepted = of_load
    return AcceptanceCounts(
        num_drafts=num_drafts,
        num_accepted=sum(accepted),
        accepted_per_position=tuple(accepted),
        tried_per_position=tuple(of_load[: len(accepted)]),
    )


def _read_positions(pairs: Sequence[tuple[int, int]]) -> AcceptanceCounts:
    tried, accepted = zip(*pairs, strict=True) if pairs else ((0,), (0,))
    return AcceptanceCounts(
        num_drafts=tried[0],
        num_accepted=sum(accepted),
        accepted_per_position=accepted,
        tried_per_position=tried,
    )


async def ask_all(
    servers: Iterable[FleetServer], needed: FleetServer | None = None, patience_s: float = 0.0
) -> dict[FleetServer, Status]:
    """Query all servers concurrently, and return the status of each that answers.

    If `needed` does not answer, all of them are queried again for up to `patience_s`. A lost
    response, or an engine that loads weights for longer than STATUS_TIMEOUT_S, must not end a
    measurement.
    """

    async def ask(server: FleetServer) -> Status | None:
        try:
            return await server.status()
        except (UnreachableError, RefusedError):
            return None

    servers = list(servers)
    pause_s, until_s = 0.05, time.monotonic() + patience_s
    while True:
        answers = await asyncio.gather(*map(ask, servers))
        found = {
            server: status
            for server, status in zip(servers, answers, strict=True)
            if status is not None
        }
        if needed is None or needed in found or time.monotonic() + pause_s > until_s:
            return found
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


async def ask_drafting(servers: Iterable[FleetServer]) -> Counter[Drafting]:
    """Count the servers by how they draft.

    Servers that do not answer, or do not report it, are left out.
    """
    return Counter(
        status.drafting
        for status in (await ask_all(servers)).values()
        if status.drafting is not None
    )


def _count_lost(capture: Mapping[str, Any]) -> dict[str, int]:
    """Count the lost records by reason.

    Raises:
        ValueError: a counter is not a valid count.
    """
    lost = {}
    for counter, reason in CAPTURE_DROP_REASONS.items():
        count = capture.get(counter, 0)
        # Not `isinstance`, which accepts True as a number.
        if type(count) is not int or not 0 <= count <= MAX_COUNTER:
            raise ValueError(f"its counter {counter} is {count!r:.50}")
        lost[reason] = count
    return lost


def make_client(url: str) -> httpx.AsyncClient:
    """Create a client for one server that bypasses any proxy set in the environment.

    A proxy would see the token, and could not reach the pods.
    """
    limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
    return httpx.AsyncClient(verify=load_certificates(url), trust_env=False, limits=limits)


@asynccontextmanager
async def connected(
    tokens: Mapping[str, str], registry: Registry | None = None
) -> AsyncIterator[list[FleetServer]]:
    """Connect to a fleet's servers, in the order of `tokens`, for versions from `registry`.

    `tokens` maps each address to its token.
    """
    async with AsyncExitStack() as clients:
        servers = []
        for url, token in tokens.items():
            http = await clients.enter_async_context(make_client(url))
            servers.append(FleetServer(url.rstrip("/"), token, http, registry=registry))
        yield servers


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The result of an attempt to swap servers to one version."""

    version: str
    refused: dict[str, str] = field(default_factory=dict)
    """Last error by address, of servers that respond."""
    absent: dict[str, str] = field(default_factory=dict)
    """Last error by address, of servers that do not respond."""

    @property
    def is_complete(self) -> bool:
        return not self.refused and not self.absent

    def __str__(self) -> str:
        return (
            "; ".join([*self.refused.values(), *self.absent.values()]) or f"all on {self.version}"
        )


async def converge(
    servers: Iterable[FleetServer], version: str, timeout_s: float, *, insist: bool = True
) -> Convergence:
    """Swap all servers to `version` concurrently, with retries for `timeout_s`.

    A server's failure is never raised. With a timeout of 0, every server is checked once and, if
    necessary, swapped once. With `insist`, a refusal is retried too, because there is no better
    option during a rollback. Without `insist`, a refusal is final.
    """
    servers = list(servers)
    errors = await asyncio.gather(
        *(bring(server, version, timeout_s, insist) for server in servers)
    )
    failed = {
        server.url: error
        for server, error in zip(servers, errors, strict=True)
        if error is not None
    }
    return Convergence(
        version=version,
        refused={
            url: str(error) for url, error in failed.items() if isinstance(error, RefusedError)
        },
        absent={
            url: str(error) for url, error in failed.items() if isinstance(error, UnreachableError)
        },
    )


async def bring(
    server: FleetServer, version: str, timeout_s: float, insist: bool
) -> UnreachableError | RefusedError | None:
    """Swap one server to `version`.

    Return None once the server serves it, otherwise the last error.

    A silent server is retried until `timeout_s` after its last response. That time may already have
    passed, so a server that no longer exists does not delay a rollout.
    """
    pause_s, deadline_s = 0.05, time.monotonic() + timeout_s
    while True:
        try:
            status = await server.status()
            if not server.serves(status, version):
                await server.swap(version)
                status = await server.status()  # trust the status, not the response to the swap
            if server.serves(status, version):
                return None
            error: UnreachableError | RefusedError = RefusedError(
                f"{server.url} accepted {version}, but reports {_describe_draft(status, version)}"
            )
        except (UnreachableError, RefusedError) as failure:
            error = failure
        is_final = isinstance(error, RefusedError) and not insist
        until_s = deadline_s
        if isinstance(error, UnreachableError):
            until_s = min(deadline_s, server.answered_s + timeout_s)
        if is_final or time.monotonic() + pause_s > until_s:
            return error
        await asyncio.sleep(pause_s)
        # a restart takes minutes, so polling more often would not help
        pause_s = min(2 * pause_s, 5.0)


def _describe_draft(status: Status, version: str) -> str:
    if status.draft_version != version:
        return status.draft_version or "no draft"
    return (
        "a version with this name but a different manifest" if status.is_intact else "a damaged one"
    )


class WindowCounts(NamedTuple):
    """Counts for one server over a window."""

    total: AcceptanceCounts
    by_domain: Mapping[str, AcceptanceCounts]
    """Acceptance by domain and, with adaptive verification, by load. Empty if the server does not
    report it, or reports inconsistent counts.
    """
    target: str | None = ""
    """Digest of the target's weights at the end; "" for the initial weights, None during an update.
    """
    is_paced: bool = False
    """`Status.is_paced`."""


def _subtract_domains(
    now: Mapping[str, AcceptanceCounts], first: Mapping[str, AcceptanceCounts]
) -> dict[str, AcceptanceCounts]:
    """Compute the counts by domain since `first`.

    Empty if a domain's count has fallen or is missing, which happens only on a faulty server.
    """
    zero = AcceptanceCounts.zero()
    differences = {
        domain: now.get(domain, zero).since(first.get(domain, zero)) for domain in {**first, **now}
    }
    counted = {domain: counts for domain, counts in differences.items() if counts is not None}
    return counted if len(counted) == len(differences) else {}


class Window:
    """Acceptance from the opening of the window onwards.

    This is the difference between two readings of the servers' counters, taken over the same time
    for all of them.
    """

    def __init__(
        self,
        first: dict[FleetServer, Status],
        needed: FleetServer | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._first, self._needed, self._patience_s = first, needed, patience_s

    @classmethod
    async def open(
        cls,
        servers: Iterable[FleetServer],
        needed: FleetServer | None = None,
        patience_s: float = 0.0,
    ) -> Window:
        """Open a window over the servers that answer.

        `needed` and `patience_s` are those of `ask_all`, also for each `read`.
        """
        return cls(await ask_all(servers, needed, patience_s), needed, patience_s)

    @property
    def targets(self) -> set[str | None]:
        """Digests of the target's weights when the window opened."""
        return {first.target for first in self._first.values()}

    def began_with(self, server: FleetServer, version: str) -> bool:
        """Whether the server served this version when the window opened."""
        first = self._first.get(server)
        return first is not None and server.serves(first, version)

    async def read(self) -> dict[FleetServer, WindowCounts]:
        """Return the counts by server since the opening.

        Servers that restarted or swapped since then are left out.
        """
        readings = await ask_all(self._first, self._needed, self._patience_s)
        counted = {}
        for server, now in readings.items():
            first = self._first[server]
            difference = now.since(first)
            if difference is not None:
                counts = (
                    (now.by_load, first.by_load)
                    if now.by_load
                    else (now.by_domain, first.by_domain)
                )
                domains = _subtract_domains(*counts)
                counted[server] = WindowCounts(difference, domains, now.target, now.is_paced)
        return counted


def is_paced(pace: str) -> bool:
    """Whether a server with this pace line drafts only while that is faster, or never."""
    return pace.startswith(("pace auto", "pace 0"))


def is_alarming(acceptance: AcceptanceCounts) -> bool:
    """Whether a draft is accepted so rarely that something must be wrong with it."""
    first = (acceptance.acceptance_per_position or [acceptance.tau - 1])[0]
    return acceptance.num_drafts >= ALARM_DRAFTS and first < ALARM_SHARE
