"""The calibration of a draft's confidence: predicted and actual acceptance by position, in bins.

Adaptive verification admits the tokens with the highest confidence, estimated by vLLM or by a
DSpark head. Among the admitted tokens, high estimates tend to be too high, so means over all tokens
are misleading if some tokens were not admitted. Within a bin of the estimate, this selection has no
effect.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 10  # of equal width


class Calibration:
    def __init__(self) -> None:
        self._sums = np.zeros((0, NUM_BINS, 3))

    def add(self, predicted_J: NDArray[np.float32], num_accepted: int) -> None:
        """Count a verified draft; `predicted_J` contains the estimates for its admitted tokens.

        A token counts only if all earlier ones were accepted, because the target did not verify
        tokens after a rejected one.
        """
        positions = np.arange(min(len(predicted_J), num_accepted + 1))
        if len(positions) > len(self._sums):
            self._sums = np.concatenate(
                [self._sums, np.zeros((len(positions) - len(self._sums), NUM_BINS, 3))]
            )
        predicted = predicted_J[: len(positions)].astype(np.float64).clip(0, 1)
        bins = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
        accepted = (positions < num_accepted).astype(float)
        self._sums[positions, bins] += np.stack(
            [np.ones_like(predicted), predicted, accepted], axis=1
        )

    def status(self) -> list[list[dict[str, Any]]]:
        """Return each position's non-empty bins: token count, mean estimate and accepted share."""
        return [
            [
                {"tokens": int(tokens), "predicted": predicted / tokens, "accepted": hit / tokens}
                for tokens, predicted, hit in bins_N3.tolist()
                if tokens
            ]
            for bins_N3 in self._sums.copy()
        ]
