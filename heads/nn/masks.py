"""Functions for parallel drafters: choose the mask token and the rows of a batch to train on.

B = batch, T = tokens, N = chosen rows.
"""

import torch
from torch import Tensor

from redraft.files.target_folder import TargetFolder, count_ids
from redraft.heads.draft import Batch


def check_mask_token(mask_token_id: int | None, num_embeddings: int) -> None:
    """Raise ValueError unless the token has a row in the target's embedding table.

    None means that no token was chosen.
    """
    if mask_token_id is not None and not 0 <= mask_token_id < num_embeddings:
        raise ValueError(
            f"mask token {mask_token_id} is not in the target's table of {num_embeddings} "
            f"embeddings: choose an id below {num_embeddings}"
        )


def choose_mask_token(target: TargetFolder, num_embeddings: int) -> int:
    """Choose a token for the empty slots.

    Return the token of the first row after the tokenizer's ids, or otherwise the padding token.
    `num_embeddings` is the number of rows in the target's table.

    Raises:
        ValueError: neither is available.
    """
    tokenizer = target.tokenizer
    if (unused := count_ids(tokenizer)) < num_embeddings:
        return unused
    pad_id: int | None = tokenizer.pad_token_id
    # A token that ends answers cannot be used, and a token that was added later has no row.
    if pad_id is None or pad_id in target.end_ids or pad_id >= num_embeddings:
        raise ValueError(
            "the tokenizer uses every row of the target's embeddings, and the padding token is "
            "missing or ends answers: set --head.mask-token-id to a token that never occurs in text"
        )
    return pad_id


TURN = 1327217885  # 2^31 / golden ratio, whose multiples spread evenly around a circle


def choose_rows(batch: Batch, has_label_BT: Tensor, count: int) -> Tensor:
    """Choose `count` distinct rows in random order, those with a label first, int64 [B, N].

    The choice depends only on the batch, so a resumed run or a run on more processes makes the same
    choice. Each `batch.salt` gives a different choice: after five epochs that each choose a quarter
    of the rows, almost every row has been chosen. The function does not wait for the device. A
    caller that counts labels there to determine `count` does.
    """
    # The keys lie on a circle. A choice takes the rows downwards from one point, and each salt
    # rotates the circle.
    turn = batch.salt * TURN % (1 << 31)
    # A hash of all tokens up to the row, with the multiplier of Knuth's multiplicative hashing.
    mixed_BT = (
        batch.input_ids_BT.cumsum(1) * 2654435761 + batch.position_ids_BT * 40503 + turn
    ) % (1 << 31)
    # int64 may wrap around, but the remainder has the divisor's sign. -1 sorts rows without a label
    # last.
    key_BT = torch.where(has_label_BT, mixed_BT, -1)
    return key_BT.topk(min(count, key_BT.shape[1]), dim=1).indices
