"""Read target signals from disk in every epoch, without the target.

                 one row per       holds                                                        distribution
TopK             labelled token    k ids and log-probabilities, 8 k bytes                       top k and a tail
HiddenStates     token             last hidden state and L streams, 2 (L + 1) D bytes in bf16   exact
                                   the same in float8 (`heads.nn.float8`), (L + 1) (D + 4)      rounded to 4 bits

A head needs every token's streams anyway. The last hidden state gives the exact distribution with
one matmul by the target's head. It takes 8 KB per token at D = 4096, whereas a row of logits takes
256 KB for a vocabulary of 128k.

B = batch, T = tokens, N = rows, D = hidden, K = kept top-k ids, L = auxiliary layers, V =
vocabulary, S = values stored per state: D, or D + 4 bytes in float8.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.distill.data.samples import Sample
from redraft.distill.signal.shards import Shards, keyed_rows
from redraft.distill.signal.sources import recorded, top_k
from redraft.distill.signal.storage import HiddenDtype
from redraft.distill.signal.transfer import host_zeros
from redraft.heads.draft import Batch, ExactTarget, TargetSignal, final_hidden, label_rows
from redraft.heads.logits import PLAIN, LogitRule
from redraft.heads.nn.float8 import SCALE_BYTES, decode_float8, encode_float8, scales
from redraft.heads.nn.shares import parts_here


@dataclass(frozen=True)
class TopK:
    """Content of a cache: the target's k largest probabilities per row that predicts a label."""

    k: int

    def __str__(self) -> str:
        return f"the top {self.k}"

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "top k", "k": self.k}

    @property
    def bytes_per_row(self) -> int:
        return 8 * self.k

    def rows(self, batch: Batch) -> Tensor:
        return label_rows(batch, 0)

    def num_rows(self, sample: Sample) -> int:
        return int(sample.loss_mask.sum())

    def select(self, signal: TargetSignal, rows_N: Tensor) -> dict[str, Tensor]:
        if isinstance(signal.distribution, ExactTarget):
            ids_NK, log_probs_NK = top_k(signal.distribution, rows_N, self.k)
        else:
            # The ids are in descending order of probability, so the first k are the largest.
            known = signal.distribution
            ids_NK = known.ids_BTK.flatten(0, 1)[rows_N, : self.k]
            log_probs_NK = known.log_probs_BTK.flatten(0, 1)[rows_N, : self.k]
        return {
            "ids": ids_NK.to("cpu", torch.int32),
            "log_probs": log_probs_NK.to("cpu", torch.float32),
        }


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Content of a cache.

    It consists of every token's last hidden state and its residual stream after each of `layers`.
    """

    layers: tuple[int, ...]
    """Target layers, ascending."""
    hidden_size: int
    dtype: HiddenDtype = "bfloat16"

    def __str__(self) -> str:
        return f"target layers {list(self.layers)} and the last hidden state"

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "hidden states", **asdict(self), "layers": list(self.layers)}

    @property
    def bytes_per_row(self) -> int:
        size, is_float8 = self.hidden_size, self.dtype == "float8"
        state_bytes: int = (
            size + SCALE_BYTES if is_float8 else size * getattr(torch, self.dtype).itemsize
        )
        return (len(self.layers) + 1) * state_bytes

    def rows(self, batch: Batch) -> Tensor:
        return batch.document_BT >= 0

    def num_rows(self, sample: Sample) -> int:
        return len(sample.input_ids)

    def select(self, signal: TargetSignal, rows_N: Tensor) -> dict[str, Tensor]:
        """Return the states to keep for these rows.

        Raises:
            ValueError: float8 cannot represent a state.
        """
        states = {"hidden": final_hidden(signal)}
        if self.layers:
            assert signal.aux_BTLD is not None
            states["aux"] = signal.aux_BTLD
        return {name: self._stored(x.flatten(0, 1)[rows_N]) for name, x in states.items()}

    def _stored(self, states: Tensor) -> Tensor:
        if self.dtype != "float8":
            return states.to("cpu", getattr(torch, self.dtype))
        codes = encode_float8(states).cpu()
        if not bool(scales(codes).isfinite().all()):
            raise ValueError(
                "a hidden state of the target is not finite, and float8 cannot represent it: "
                "use --signal.cache-dtype bfloat16"
            )
        return codes


class CachedTarget:
    def __init__(self, folder: Path, content: TopK, *, target: str, data: str) -> None:
        """Open a complete cache. Raises the same errors as `Shards`."""
        self._shards, self.k = Shards(folder, content, target=target, data=data), content.k

    def __call__(self, batch: Batch) -> TargetSignal:
        """Return the signal for a batch.

        Raises:
            ValueError: a document of the batch was not cached or is corrupt.
        """
        # Start with an empty tensor, so that there is something to concatenate without labels.
        # Records are in host memory, and rows on the device.
        ids_NK, log_probs_NK = [torch.empty(0, self.k, dtype=torch.int32)], [torch.empty(0, self.k)]
        rows_N = [torch.empty(0, dtype=torch.int64, device=batch.input_ids_BT.device)]
        for key, rows in keyed_rows(batch, label_rows(batch, 0)):
            kept = self._shards.document(key)
            rows_N.append(rows)
            ids_NK.append(kept["ids"])
            log_probs_NK.append(kept["log_probs"])
        return recorded(batch, torch.cat(rows_N), torch.cat(ids_NK), torch.cat(log_probs_NK))


class CachedHiddenStates:
    """The signal read from a cache of `HiddenStates`.

    It is exact, except for rounding to the cache's dtype.
    """

    def __init__(
        self,
        folder: Path,
        content: HiddenStates,
        *,
        target: str,
        data: str,
        head_VD: Tensor,
        rule: LogitRule = PLAIN,
    ) -> None:
        """Open a complete cache. Raises the same errors as `Shards`."""
        self._shards, self.head_VD, self._rule = (
            Shards(folder, content, target=target, data=data),
            head_VD,
            rule,
        )
        self._is_float8 = content.dtype == "float8"
        # E.g. for a cache with layers [2, 8, 13] and a head with [2, 13], these are [0, 2].
        self._places = [
            self._shards.header.content["layers"].index(layer) for layer in content.layers
        ]

    def __call__(self, batch: Batch) -> TargetSignal:
        """Return the signal for a batch.

        Raises:
            ValueError: a document of the batch was not cached or is corrupt.
        """
        shape, num_stored = batch.input_ids_BT.shape, self.head_VD.shape[1]
        dtype, device = self.head_VD.dtype, self.head_VD.device
        if self._is_float8:
            num_stored, dtype = num_stored + SCALE_BYTES, torch.uint8
        hidden_BTS = host_zeros(*shape, num_stored, dtype=dtype, device=device)
        aux_BTLS = host_zeros(*shape, len(self._places), num_stored, dtype=dtype, device=device)
        hidden_NS, aux_NLS = hidden_BTS.flatten(0, 1), aux_BTLS.flatten(0, 1)
        whole = batch if batch.shared is None else batch.shared.whole
        for key, rows_N in keyed_rows(whole, whole.document_BT >= 0):
            kept = self._shards.document(key)
            # A document's rows are consecutive.
            for rows, part in parts_here(batch, int(rows_N[0]), len(rows_N)):
                # `copy_` converts the dtype while it reads from the mapped file, so there is no
                # second copy in memory.
                hidden_NS[rows].copy_(kept["hidden"][part])
                for own, place in enumerate(self._places):
                    aux_NLS[rows, own].copy_(kept["aux"][part, place])
        return TargetSignal(
            distribution=ExactTarget(
                hidden_BTD=self._on_device(hidden_BTS), head_VD=self.head_VD, rule=self._rule
            ),
            aux_BTLD=self._on_device(aux_BTLS) if self._places else None,
        )

    def _on_device(self, states: Tensor) -> Tensor:
        """Copy states [..., S] from host memory to the head's device; return them as [..., D]."""
        there = states.to(self.head_VD.device, non_blocking=True)
        # Decode on the device, because a GPU decodes faster and only half the bytes must be copied.
        return decode_float8(there, self.head_VD.dtype) if self._is_float8 else there
