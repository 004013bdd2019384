"""Let a standalone draft reread the served text after a swap.

The target's KV cache stays unchanged. Target and draft keep their keys and values in the same
blocks. The new draft's keys and values are missing in all blocks written before the swap, including
blocks that a later request finds in the prefix cache. Before each step, the draft reprocesses the
tokens of the step's requests from the first such block on, but at most as many tokens as a step may
have. The target reprocesses nothing.

A head cannot do this, because it would need the target's hidden states for those tokens, which vLLM
does not keep.

T = tokens read, B = requests, N = blocks of a request.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vllm.redraft")

# Whether the argument is true on all tensor-parallel ranks; every rank must call it.
Agree = Callable[[bool], bool]

ReadText = Callable[[str, int, int], Sequence[int] | Tensor]  # (request, from, to) -> known tokens


@dataclass
class _Request:
    blocks: list[int]
    prompt_ids: Sequence[int] | None
    num_fresh: int = 0
    """Number of leading blocks that hold the served draft's KV cache entries."""


@dataclass(frozen=True)
class Span:
    """A part of a request's text. All of its blocks except the last are full."""

    request_id: str
    begin: int
    end: int


class Ledger:
    """Tracks all running requests' blocks, and which of them hold the served draft's KV cache."""

    def __init__(self, group: int, block_size: int) -> None:
        """Create a ledger for the draft's layers.

        `group` is the index of these layers among vLLM's groups of layers that share a block table.
        """
        self.group, self.block_size = group, block_size
        self.requests: dict[str, _Request] = {}
        # None until the first swap, because until then the served draft has written all blocks.
        self.fresh: set[int] | None = None

    def forget(self) -> None:
        """Treat all blocks as written by a different draft."""
        self.fresh = set()
        for request in self.requests.values():
            request.num_fresh = 0

    def follow(self, scheduler_output: Any) -> dict[str, int]:
        """Update the ledger from a step's scheduler output.

        Return the number of tokens of each request that were read before the step, by request id.
        """
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            prompt_ids = new.prefill_token_ids or new.prompt_token_ids
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens, prompt_ids)
            computed[new.req_id] = new.num_computed_tokens
        known = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, count in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            request = self.requests[request_id]
            computed[request_id] = count
            if request_id in known.resumed_req_ids:
                self._begin(request_id, blocks, count, request.prompt_ids)
            elif blocks is not None:
                # New blocks need no rereading, because the served draft itself writes them as the
                # text grows.
                request.blocks += blocks[self.group]
                self._note_fresh(blocks[self.group])
        return computed

    def choose(self, computed: Mapping[str, int], max_tokens: int) -> list[Span]:
        """Choose the spans that the draft should read now, with at most `max_tokens` in total.

        From then on, their blocks count as read.
        """
        if self.fresh is None:
            return []
        spans = []
        for request_id, count in computed.items():
            request = self.requests[request_id]
            # Round up: e.g. 33 tokens in blocks of 16 take 3. The last block may be read before it
            # is full.
            num_used = -(-count // self.block_size)
            # A block from the prefix cache may already have been reread for a different request.
            while request.num_fresh < num_used and request.blocks[request.num_fresh] in self.fresh:
                request.num_fresh += 1
            num_blocks = min(num_used - request.num_fresh, max_tokens // self.block_size)
            if num_blocks <= 0 or request.prompt_ids is None:
                continue
            begin, last = request.num_fresh * self.block_size, request.num_fresh + num_blocks
            self._note_fresh(request.blocks[request.num_fresh : last])
            request.num_fresh = last
            spans.append(Span(request_id, begin, min(count, last * self.block_size)))
            max_tokens -= num_blocks * self.block_size
        return spans

    def _begin(
        self, request_id: str, blocks: Any, num_computed: int, prompt_ids: Sequence[int] | None
    ) -> None:
        own = list(blocks[self.group])
        self.requests[request_id] = _Request(own, prompt_ids)
        # Cached blocks come first. The blocks after them are new, and belong to this request.
        self._note_fresh(own[-(-num_computed // self.block_size) :])

    def _note_fresh(self, blocks: Sequence[int]) -> None:
        if self.fresh is not None:
            self.fresh.update(blocks)


class Rereader:
    """Tracks a model runner, and makes the draft reread text where necessary."""

    def __init__(
        self,
        runner: Any,
        proposer: Any,
        groups: Sequence[Any],
        read_text: ReadText,
        agree: Agree | None = None,
    ) -> None:
        """Follow the runner of a standalone draft.

        `proposer` is vLLM's proposer for the draft, and `groups` are its layers' attention groups.

        Raises:
            ValueError: the layout of the draft's KV cache is not supported here.
        """
        self.runner, self.proposer, self.groups, self.read_text = (
            runner,
            proposer,
            groups,
            read_text,
        )
        self._agree, self._is_among_ranks = agree or agree_on_ranks, False
        self._num_ranks: int = proposer.vllm_config.parallel_config.tensor_parallel_size
        self.max_tokens: int = proposer.vllm_config.scheduler_config.max_num_batched_tokens
        self.num_tokens = 0  # Tokens reread since the start.
        self.error = ""
        _require_plain_keys(proposer, groups)
        self.ledger = Ledger(groups[0].kv_cache_group_id, groups[0].kv_cache_spec.block_size)
        self.next_execute: Callable[..., Any]
        """The runner's original `execute_model` (`worker_hooks.reread_before_steps`)."""

    def execute(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        if not self.error:
            try:
                self._follow(scheduler_output)
            except (
                Exception
            ) as error:  # outdated entries only cost acceptance, but an exception ends the server
                if (
                    self._is_among_ranks
                ):  # the other ranks are in the pass, and would wait for this rank forever
                    raise
                logger.exception("redraft: the draft no longer rereads text after a swap")
                self.error = f"{type(error).__name__}: {error}"
        # Call the target's pass only after the rereading: the draft proposes at the end of this
        # step, and needs the new KV cache entries then.
        return self.next_execute(scheduler_output, *args, **options)

    def _follow(self, scheduler_output: Any) -> None:
        computed = self.ledger.follow(scheduler_output)
        spans = self.ledger.choose(computed, max(self.max_tokens, self.ledger.block_size))
        if (
            sum(span.end - span.begin for span in spans) > self.max_tokens
        ):  # a single block that exceeds a step's token limit
            for first in range(spans[0].begin, spans[0].end, self.max_tokens):
                self.read(
                    [replace(spans[0], begin=first, end=min(first + self.max_tokens, spans[0].end))]
                )
        elif spans:
            self.read(spans)

    @torch.inference_mode()
    def read(self, spans: Sequence[Span]) -> None:
        """Run one pass of the draft over the spans, only to fill its KV cache.

        Tokens that are not available on the host are skipped.

        Raises:
            RuntimeError: another rank does not have enough memory for the pass.
        """
        try:
            inputs = self._prepare(spans)
        except Exception:
            self._agree(False)
            raise
        # The pass sums over the ranks, so either all of them run it or none does.
        if not self._agree(True):
            raise RuntimeError("another rank cannot reread the text")
        self._is_among_ranks = self._num_ranks > 1
        self._pass(*inputs)
        self._is_among_ranks = False
        self.num_tokens += len(inputs[0])

    def _prepare(
        self, spans: Sequence[Span]
    ) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Tensor]]:
        """Return (ids, positions, vLLM's description of the pass, slots to write).

        The last two are given by layer.
        """
        device = self.proposer.device
        texts = [self._read_ids(span) for span in spans]
        spans = [
            replace(span, end=span.begin + len(ids)) for span, ids in zip(spans, texts, strict=True)
        ]
        ids_T = torch.cat([ids.to(device) for ids in texts])
        positions_T = torch.cat([torch.arange(span.begin, span.end) for span in spans])
        attention, slots_T = self._place(spans, positions_T)
        layers = [layer for group in self.groups for layer in group.layer_names]
        by_group = [
            group.build_metadata_for_drafting(attention, draft_index=0) for group in self.groups
        ]
        metadata = {
            name: each
            for group, each in zip(self.groups, by_group, strict=True)
            for name in group.layer_names
        }
        return ids_T, positions_T.to(device), metadata, dict.fromkeys(layers, slots_T)

    def _pass(
        self, ids_T: Tensor, positions_T: Tensor, metadata: Any, slots: dict[str, Tensor]
    ) -> None:
        from vllm.forward_context import set_forward_context

        with set_forward_context(
            metadata, self.proposer.vllm_config, num_tokens=len(ids_T), slot_mapping=slots
        ):
            # The output is dropped. Attention writes keys and values to the slots during the pass.
            self.proposer.model(input_ids=ids_T, positions=positions_T)

    def _read_ids(self, span: Span) -> Tensor:
        prompt_ids = self.ledger.requests[span.request_id].prompt_ids
        assert prompt_ids is not None
        ids = torch.tensor(prompt_ids[span.begin : span.end], dtype=torch.int32)
        if span.end <= len(prompt_ids):
            return ids
        output = torch.as_tensor(
            self.read_text(span.request_id, max(span.begin, len(prompt_ids)), span.end)
        ).int()
        return torch.cat([ids.to(output.device), output])

    def _place(self, spans: Sequence[Span], positions_T: Tensor) -> tuple[Any, Tensor]:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        size = self.ledger.block_size
        tables = [
            torch.tensor(self.ledger.requests[span.request_id].blocks[: -(-span.end // size)])
            for span in spans
        ]
        table_BN = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        counts = [span.end - span.begin for span in spans]
        starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        rows_T = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(counts))
        # E.g. position 18 in blocks [7, 3] of 16 is slot 3 * 16 + 2 = 50.
        slots_T = table_BN[rows_T, positions_T // size] * size + positions_T % size
        ends = [span.end for span in spans]
        device = self.proposer.device
        attention = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            # End positions, not counts, because a span attends to all of the tokens before it.
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
            num_reqs=len(spans),
            num_actual_tokens=len(positions_T),
            max_query_len=max(counts),
            max_seq_len=max(ends),
            block_table_tensor=table_BN.int().to(device),
            slot_mapping=slots_T.to(device),
            positions=positions_T.to(device),
            is_prefilling=torch.ones(len(spans), dtype=torch.bool),
        )
        return attention, attention.slot_mapping


def agree_on_ranks(ok: bool) -> bool:
    """Return an `Agree` over vLLM's tensor-parallel group, on the host.

    A rank whose GPU is out of memory can therefore still report this.
    """
    from vllm.distributed import get_tp_group

    ranks = get_tp_group()
    if ranks.world_size == 1:
        return ok
    said = torch.tensor([ok], dtype=torch.int32)
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MIN, group=ranks.cpu_group)
    return bool(said)


def _require_plain_keys(proposer: Any, groups: Sequence[Any]) -> None:
    parallel = proposer.vllm_config.parallel_config
    reasons = {
        "whose layers have several block tables": len({group.kv_cache_group_id for group in groups})
        != 1,
        "with recurrent layers": any(
            not hasattr(group.kv_cache_spec, "num_kv_heads") for group in groups
        ),
        "with a window over its keys": any(
            getattr(group.kv_cache_spec, "sliding_window", None) for group in groups
        ),
        "with one text's KV cache split over several ranks": parallel.decode_context_parallel_size
        > 1,
        "whose target shares experts between replicas": parallel.is_moe_model
        and parallel.data_parallel_size > 1,
        "with another vocabulary": getattr(proposer, "vocab_mapping", None) is not None,
        "with positions in several dimensions": getattr(proposer, "uses_mrope", False),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"a draft {reason} cannot reread text after a swap")
