"""Acceptance by position, from the acceptance of each token."""

from __future__ import annotations

from collections.abc import Sequence


def cumulative(conditional: Sequence[float]) -> list[float]:
    """Acceptance per position c_j = prod_{i<=j} a_i.

    a_j = P(token j accepted | the earlier ones were).
    """
    products, product = [], 1.0
    for rate in conditional:
        product *= rate
        products.append(product)
    return products
