import pytest
import torch

from redraft.heads.draft import Batch


def test_texts_of_different_lengths_are_padded_on_the_right_and_labelled_after_their_prompts():
    batch = Batch.padded([[5, 6, 7], [8, 9, 10, 11, 12]], [1, 3])
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 0, 0], [8, 9, 10, 11, 12]]
    assert batch.loss_mask_BT.long().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]]
    assert batch.document_BT.tolist() == [[0, 0, 0, -1, -1], [0, 0, 0, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
    assert (
        batch.input_ids_BT.dtype
        == batch.document_BT.dtype
        == batch.position_ids_BT.dtype
        == torch.int64
    )
    assert batch.loss_mask_BT.dtype == torch.bool


def test_without_a_prompt_every_token_is_a_label():
    batch = Batch.padded(list(torch.arange(6).view(2, 3)))
    assert batch.loss_mask_BT.all()
    assert batch.input_ids_BT.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_documents_of_a_row_are_laid_end_to_end():
    first, second = ([5, 6], [False, True]), ([7, 8, 9], [False, True, False])
    batch = Batch.packed([[first, second], []], width=6)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8, 9, 0], [0] * 6]
    assert batch.loss_mask_BT.long().tolist() == [[0, 1, 0, 1, 0, 0], [0] * 6]
    assert batch.document_BT.tolist() == [[0, 0, 1, 1, 1, -1], [-1] * 6]
    assert batch.position_ids_BT.tolist() == [[0, 1, 0, 1, 2, 0], [0] * 6]


def test_a_prompt_length_for_each_text_is_required():
    with pytest.raises(ValueError, match="zip"):
        Batch.padded([[1, 2], [3, 4]], [1])
