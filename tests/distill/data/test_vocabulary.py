"""The draft vocabulary that is counted from the data."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.distill.data.samples import Sample
from redraft.distill.data.vocabulary import choose_size, frequent_ids


def make_sample(ids: list[int], labels: list[bool]) -> Sample:
    return Sample(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(labels, np.bool_),
        conversation="c",
        domain="all",
    )


SAMPLES = [
    make_sample([7, 7, 7, 7, 5, 2, 5], [False] * 4 + [True] * 3),
    make_sample([9, 5, 2, 8], [False, True, True, True]),
]
"""Labels: 5 three times, 2 twice, 8 once. 7 and 9 are never labels."""


@pytest.mark.parametrize(
    ("size", "kept"), [(1, [5]), (2, [2, 5]), (3, [2, 5, 8]), (4, [0, 2, 5, 8])]
)
def test_the_ids_that_are_labels_most_often_are_kept_ascending(size: int, kept: list[int]) -> None:
    ids_W = frequent_ids(SAMPLES, size, vocab_size=12)
    assert ids_W is not None
    assert ids_W.tolist() == kept


def test_the_share_of_labels_that_is_kept_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    frequent_ids(SAMPLES, 2, vocab_size=12)
    assert capsys.readouterr().out == "draft vocabulary: 2 of 12 ids, 83.33% of the labels\n"


@pytest.mark.parametrize("size", [0, 12])
def test_the_whole_vocabulary_needs_no_map(size: int) -> None:
    assert frequent_ids(SAMPLES, size, vocab_size=12) is None


@pytest.mark.parametrize(
    ("asked", "usual", "size"),
    [
        (None, 9, 9),
        (None, 12, 0),
        (None, 13, 0),
        (None, None, 0),
        (0, 9, 0),
        (7, 9, 7),
        (12, 9, 12),
    ],
)
def test_the_usual_size_applies_only_to_larger_targets(
    asked: int | None, usual: int | None, size: int
) -> None:
    assert choose_size(asked, usual, vocab_size=12) == size


@pytest.mark.parametrize("asked", [-1, 13])
def test_more_ids_than_the_target_has_are_refused(asked: int) -> None:
    with pytest.raises(ValueError, match=rf"^--draft-vocab-size {asked}: .*\b12\b"):
        choose_size(asked, 9, vocab_size=12)
