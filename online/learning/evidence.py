"""Choose the requests that candidates are evaluated on, and the records to replay.

Conversations are distinct, and each tenant has a limited share of them. All functions are pure.

    held-out records ─► newest request of each prompt ─► conversations ─► share per tenant, by domain
    ─► share per tenant, over all ─► several turns of each conversation, if there are few

The requests of one conversation are correlated, so its counts are summed before the evaluation, and
a conversation counts as one request. A request without earlier or later turns is a conversation.

No single tenant may decide alone, whether by sending many requests, repeating a prompt, or
inventing domains. A tenant is a value of X-Redraft-Tenant, and all records without one count as one
tenant: set the header at the gateway.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redraft.online.learning.buffer_file import Index
from redraft.online.learning.config import Replay

# Name for all domains that are not evaluated separately. `other` itself is not evaluated.
OTHER = "other"
MAX_DOMAINS = 32  # maximum number of separate domains, in addition to the known ones

FULL_TENANT, LEAST_FULL = 20, 5
"""A tenant with FULL_TENANT requests counts in full, and smaller tenants count together, so that a
single stray request does not add a tenant and halve the share of the first one. If half of the
tenants have fewer requests, their number of requests is used instead, down to LEAST_FULL, so that
many small tenants do not count as one next to a large one.
"""


@dataclass(frozen=True, kw_only=True)
class EvidenceLimits:
    """Limits on the requests used to evaluate a draft."""

    per_domain: int
    """Maximum number of requests per domain, all turns of a conversation included."""
    tenant_share: float = 1.0
    """Maximum share of one tenant in the conversations; see `take_fairly`."""
    at_least: int = 0
    """Minimum number of conversations to keep, even if that exceeds the share."""
    at_least_of_domain: int = 0
    """Minimum number of conversations to keep within a domain, in the same way."""
    since_s: float = -math.inf
    """Use only records that arrived after this time, in seconds since the epoch."""


def choose_evidence(held_out: Index, names: Mapping[str, str], limits: EvidenceLimits) -> list[int]:
    """Return the sequence numbers of the records used to evaluate a draft, in ascending order.

    The records make up whole requests of the newest conversations in every domain. `held_out` is
    the index of all held-out records, and `names` comes from `name_domains`. A prompt counts once,
    with its newest request. A conversation has the domain and the tenant of its newest request.
    """
    held_out = held_out[held_out["time_s"] >= limits.since_s]
    tenants, conversations = held_out["tenant"], held_out["conversation"].tolist()
    by_conversation = defaultdict(list)
    for row in _take_newest_requests(held_out):
        by_conversation[tenants[row], conversations[row]].append(row)
    # Keyed by the newest row, newest first.
    turns = {rows[0]: rows for rows in by_conversation.values()}
    domains = {row: names.get(held_out["domain"][row], OTHER) for row in turns}
    by_domain = defaultdict(list)
    for row, domain in domains.items():
        by_domain[domain].append(row)
    chosen: set[int] = set()
    for rows in by_domain.values():
        of_domain = [tenants[row] for row in rows]
        taken = take_fairly(
            of_domain, limits.per_domain, limits.tenant_share, limits.at_least_of_domain
        )
        chosen |= {rows[position] for position in taken}
    # Newest first again, so that applying the share over all domains drops the oldest.
    rows = [row for row in turns if row in chosen]
    taken = take_fairly(
        [tenants[row] for row in rows], len(rows), limits.tenant_share, limits.at_least
    )
    kept = [rows[position] for position in taken]
    # With few conversations, more of their turns are scored at the same cost, which narrows the
    # bounds, and represents the traffic better than the last turns.
    num_turns = {
        domain: limits.per_domain // count
        for domain, count in Counter(domains[row] for row in kept).items()
    }
    spread = [turn for row in kept for turn in _spread(turns[row], num_turns[domains[row]])]
    # So far, there is one row per request, but the evaluation needs all of its segments.
    requests = held_out["request"][spread]
    return [int(seq) for seq in held_out["seq"][np.isin(held_out["request"], requests)]]


def _spread(rows: Sequence[int], count: int) -> Sequence[int]:
    """Return at most `count` of the rows, evenly spaced, including the first."""
    return rows[:: math.ceil(len(rows) / max(1, count))]


def _take_newest_requests(held_out: Index) -> list[int]:
    found: dict[int, int] = {}
    # The index is sorted by number, so in reverse the first row of a prompt is the newest. A dict
    # keeps this order.
    for row, prompt in reversed(list(enumerate(held_out["prompt"].tolist()))):
        found.setdefault(prompt, row)
    return list(found.values())


def name_domains(index: Index, known: Collection[str]) -> Mapping[str, str]:
    """Return the name of each of the index's domains in evaluations and on the page.

    Known domains keep their names, and so do the MAX_DOMAINS largest other domains, ranked by
    number of tenants and then by number of records. All remaining domains are named OTHER. In a
    fleet with several tenants, a domain needs at least two of them, because any client can send
    X-Redraft-Domain.
    """
    pairs = Counter(zip(index["domain"].tolist(), index["tenant"].tolist(), strict=True))
    tenants, records = Counter[str](), Counter[str]()
    for (domain, _), count in pairs.items():
        tenants[domain] += 1
        records[domain] += count
    wanted = min(2, count_tenants(index["tenant"].tolist()))
    unknown = [domain for domain in records if domain not in known and tenants[domain] >= wanted]
    unknown.sort(key=lambda domain: (-tenants[domain], -records[domain], domain))
    named = {*known, *unknown[:MAX_DOMAINS]}
    return {domain: (domain or "all") if domain in named else OTHER for domain in records}


def count_tenants(tenants: Sequence[str]) -> int:
    """Return the number of tenants with many requests; smaller ones count together. At least 1."""
    # E.g. for 90, 35 and 10 requests, (20 + 20 + 10) // 20 = 2 tenants; for 90 and twelve tenants
    # with 2 each, (5 + 24) // 5 = 5.
    counts = np.array(list(Counter(tenants).values()) or [0])
    full = int(np.clip(np.median(counts), LEAST_FULL, FULL_TENANT))
    return max(1, int(np.minimum(counts, full).sum()) // full)


def find_excess(
    tenants: NDArray[np.object_], sizes: NDArray[np.int64], share: float
) -> NDArray[np.bool_]:
    """Find which records, given oldest first, exceed their tenant's `share` of all bytes.

    The result marks the oldest records of each tenant that has more than its share.
    """
    used = Counter[str]()
    for tenant, size in zip(tenants.tolist(), sizes.tolist(), strict=True):
        used[tenant] += size
    limit = max(share, 1 / max(1, len(used))) * used.total()
    found = np.zeros(len(tenants), bool)
    for tenant in [tenant for tenant, size in used.items() if size > limit]:
        (rows,) = np.nonzero(tenants == tenant)
        found[rows[np.cumsum(sizes[rows]) <= used[tenant] - limit]] = True
    return found


def take_fairly(tenants: Sequence[str], count: int, share: float, at_least: int) -> list[int]:
    """Return the positions of at most `count` requests, given the tenant of each request.

    The first requests are chosen, with at most a `share` of them per tenant. If there are fewer
    than 1 / `share` tenants, each may have an equal part. If this would leave fewer than `at_least`
    requests, the tenants with the most requests fill the rest in equal parts.
    """
    counts = np.array(list(Counter(tenants).values()))
    share = max(share, 1 / count_tenants(tenants))
    size = min(count, len(tenants))
    # E.g. with 60, 20 and 20 requests from three tenants and a share of a third, the sum falls to
    # 33 + 20 + 20 = 73, then 24 + 20 + 20 = 64, then 61, and stays at 60, because 20 is a third of
    # 60.
    while size > (possible := int(np.minimum(counts, _part(share, size)).sum())):
        size = possible  # the total is smaller, and so is each part
    limit = _part(share, size)
    if size < (needed := min(at_least, count, len(tenants))):
        size = needed
        # The share leaves too few requests: raise the limit until all tenants together fill `size`.
        while int(np.minimum(counts, limit).sum()) < size:
            limit += 1
    taken: list[int] = []
    used = Counter[str]()
    for position, tenant in enumerate(tenants):
        if len(taken) == size:
            break
        if used[tenant] < limit:
            used[tenant] += 1
            taken.append(position)
    return taken


def _part(share: float, size: int) -> int:
    # A decimal share times a size may fall just below the exact whole number.
    return int(share * size + 1e-9)


def choose_replayed(
    index: Index,
    count: int,
    policy: Replay,
    *,
    now_s: float,
    rng: np.random.Generator,
    tenant_share: float,
) -> NDArray[np.int64]:
    """Return the sequence numbers of `count` distinct records in the index.

    The numbers are in the order that `policy` draws the records. No tenant has more than
    `tenant_share` of them while others have records left.
    """
    order = _draw(_log_weights(index, now_s, policy), rng)
    # `at_least` equals `count`, so a tenant's share is exceeded before a step gets fewer records.
    order = order[take_fairly(index["tenant"][order].tolist(), count, tenant_share, count)]
    seqs: NDArray[np.int64] = index["seq"][order]
    return seqs


def _log_weights(index: Index, now_s: float, policy: Replay) -> NDArray[np.float64]:
    """Return the logarithm of `Replay`'s weight for every record of the index; [records]."""
    # Logarithms are needed because with a half-life of 5 minutes, 4 days give 2^-1152, which is
    # below float64.
    refused = (index["num_wrong"] + 1) / (index["num_drafted"] + 2)
    half_lives = (now_s - index["time_s"]) / policy.half_life_s
    log_weight: NDArray[np.float64] = np.log1p(policy.surprise * refused) - np.log(2) * half_lives
    return log_weight


def _draw(log_weight: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return all positions in the order of a weighted draw without replacement.

    This is Gumbel top-k (arXiv 1903.06059): sorting by log-weight plus Gumbel noise gives the same
    distribution.
    """
    return np.argsort(-(log_weight + rng.gumbel(size=len(log_weight))))
