"""Hooks on an instance of vLLM's V2 model runner.

No other file uses its names.

The logits of a step are local to `GPUModelRunner.sample`. The hooks therefore watch the two
callables that receive them: `sampler` in a step without drafts, `rejection_sampler` in other steps.

Hooks must take the following into account. If steps are scheduled ahead, the host's copies of
positions are too high, so positions are read on the device. Ids sampled beyond `num_sampled` are
leftovers. The next step overwrites the buffers `input_ids`, `positions` and `draft_logits`.
`_remove_request` is also called for preempted requests.

B = requests of the step, R = logit rows, V = vocabulary, J = draft tokens of one request.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from redraft.engine.adaptive import explain_refusal
from redraft.engine.hooks import RunnerState, around, find_state, hook
from redraft.online.engine.capture import Capture
from redraft.online.engine.domains import LOOKUP_METHODS, find_padded, mark_step
from redraft.online.engine.feed import Batch, Feed
from redraft.online.engine.one_pass import find_in_one_pass, gather_probs
from redraft.online.engine.reread import ReadText
from redraft.online.engine.steps import DeviceRanges, EngineStep
from redraft.online.records.record import LOOKUP, PADDING

RUNNER = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WARMUP_IDS = ("_warmup", "_v2_")  # Beginnings of the ids of vLLM's own requests while it starts.


def install_capture(runner: Any, capture: Capture) -> None:
    """Make `capture` receive every step of `runner`.

    Raises:
        ValueError: the runner uses an unknown kind of batch.
    """
    _require_plain_batches(runner)
    ours = _Hooks(runner, capture)
    hook(runner.sampler, "capture", __call__=ours.watch)
    if runner.rejection_sampler is not None:
        hook(runner.rejection_sampler, "capture", __call__=ours.watch)
    hook(
        runner,
        "capture",
        add_requests=around(ours, "_add_requests", ours.add_requests),
        finish_requests=around(ours, "_finish_requests", ours.finish_requests),
    )
    if runner.structured_outputs_worker is not None:
        mask = around(ours, "_mask", ours.mask)
        hook(runner.structured_outputs_worker, "capture", apply_grammar_bitmask=mask)
    if capture.config.hidden_states and runner.speculator is not None:
        hook(runner.speculator, "capture", propose=around(ours, "_propose", ours.propose))


def _require_plain_batches(runner: Any) -> None:
    unknown = {
        "batch-sharded sampling": runner.batch_sharder,
        "prefill context parallelism": runner.pcp_manager,
    }
    for name, part in unknown.items():
        if part is not None:
            raise ValueError(
                f"a server with {name} cannot be recorded: start it without {name} or without "
                f"capture"
            )


def install_proposers(runner: Any) -> None:
    """Report to the scheduler which draft tokens were looked up, or how many were admitted.

    Tokens are admitted under adaptive verification, and a server never has both features.
    """
    state = find_state(runner, RunnerState)
    if runner.adaptive_verification is not None:
        hook(runner, "proposers", sample_tokens=partial(_count_admitted, runner))
    elif state.lookup is not None:
        state.proposers = Proposers(runner, state.lookup)


def _count_admitted(runner: Any, sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the runner's `sample_tokens` to add the number of admitted draft tokens to its output.

    The device chooses these tokens. Their number is copied together with the sampled tokens, on the
    same stream and before the same event, so the copy causes no further wait.
    """

    def sample_and_count(*args: Any, **options: Any) -> Any:
        output = sample(*args, **options)
        if not hasattr(output, "copy_event"):  # nothing was sampled
            return output
        copies, num_rejected_B = runner.output_copy_stream, output.sampler_output.num_rejected
        torch.cuda.set_stream(copies)
        try:
            rejected = num_rejected_B.to("cpu", non_blocking=True, copy=True).numpy()
            output.copy_event.record(copies)
        finally:
            torch.cuda.set_stream(runner.main_stream)
        finish = output.get_output

        def get_output() -> Any:
            result = finish()
            admitted = (output.num_sampled_tokens_np - 1 + rejected).tolist()
            mark_step(result, admitted=dict(zip(result.req_ids, admitted, strict=False)))
            return result

        output.get_output = get_output
        return output

    return sample_and_count


class Proposers:
    """Tracks the requests whose pending draft tokens were looked up.

    `sample_tokens` verifies these tokens, and then proposes the next ones.
    """

    def __init__(self, runner: Any, lookup: Any) -> None:
        self.lookup = lookup
        self.foreign: dict[str, int] = {}
        self._sample_tokens: Any
        hook(
            runner,
            "proposers",
            sample_tokens=around(self, "_sample_tokens", self.sample_tokens),
        )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        verified = self.foreign
        result = self._sample_tokens(*args, **kwargs)
        if verified and result is not None:
            mark_step(result.model_runner_output, foreign=verified)
        texts = self.lookup.texts
        # A request that was not in this step keeps its draft for a later step.
        scheduled = set(texts.input_batch.req_ids)
        waiting = {
            name: kind
            for name, kind in verified.items()
            if name not in scheduled and name in texts.requests
        }
        self.foreign = waiting | dict.fromkeys(self.lookup.looked_up, LOOKUP)
        return result


def find_proposer(runner: Any) -> tuple[Any, list[Any], ReadText]:
    def read_text(request_id: str, begin: int, end: int) -> Tensor:
        states = runner.req_states
        text: Tensor = states.all_token_ids.gpu[states.req_id_to_index[request_id], begin:end]
        return text

    return runner.speculator, list(chain.from_iterable(runner.speculator.attn_groups)), read_text


def install_pace(runner: Any, *, has_keys: bool) -> None:
    """Skip the draft at 0 draft tokens, unless it must write a prompt's KV cache entries."""
    most = runner.num_speculative_steps

    def pace(propose: Callable[..., Any]) -> Callable[..., Any]:
        # Use vLLM's parameter names, because vLLM passes some arguments by keyword.
        def propose_or_not(input_batch: Any, *args: Any, **options: Any) -> Any:
            batch, number = input_batch, options.get("num_speculative_tokens", most)
            # Do not use the scheduler's draft tokens, because adaptive verification may have left
            # some out.
            reads_prompt = batch.num_tokens > batch.num_reqs + batch.num_draft_tokens
            if not number and not (has_keys and reads_prompt):
                return runner.req_states.draft_tokens.new_full((batch.num_reqs, most), -1)
            # Otherwise, it would draft the maximum number of tokens.
            if runner.speculative_config.method == "draft_model":
                runner.speculator.num_speculative_steps = max(1, number)
            return propose(batch, *args, **options)

        return propose_or_not

    hook(runner.speculator, "pace", propose=pace)


def explain_adaptive(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap vLLM's factory for adaptive-verification managers, so that errors name a remedy."""

    def make_or_explain(**options: Any) -> Any:
        try:
            return make(**options)
        except ValueError as error:
            raise ValueError(f"redraft: --pace: {explain_refusal(str(error))}") from error

    return make_or_explain


def without_table(init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a block draft's `_init_candidates` to prepare CUDA graphs only for whole blocks.

    Such a draft never runs anything else.
    """

    def init_without_table(manager: Any) -> None:
        speculative = manager.vllm_config.speculative_config
        table = speculative.num_speculative_tokens_per_batch_size
        speculative.num_speculative_tokens_per_batch_size = None
        init(manager)
        speculative.num_speculative_tokens_per_batch_size = table

    return init_without_table


def complete_graphs(init: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `_init_candidates` for CUDA graphs with a varying number of draft tokens.

    vLLM considers only the next captured token count, for which there may be no graph of this query
    length. The wrapper adds the next count for which there is one.
    """

    def init_complete(manager: Any) -> None:
        init(manager)
        graphs = sorted(
            chain.from_iterable(manager._capture_descs.values()), key=lambda graph: graph.num_tokens
        )
        for (num_tokens, num_loras), found in manager._candidates.items():
            known = {(graph.uniform_token_count, graph.num_ubatches) for graph in found}
            for graph in graphs:
                kind = graph.uniform_token_count, graph.num_ubatches
                is_larger = graph.num_tokens >= num_tokens and graph.num_active_loras == num_loras
                if kind[0] and is_larger and kind not in known:
                    known.add(kind)
                    found.insert(0, graph)

    return init_complete


class _Hooks:
    def __init__(self, runner: Any, capture: Capture) -> None:
        self.runner = runner
        self.capture = capture
        self.feed = Feed(capture, runner.max_model_len)
        self._add_requests: Any
        self._finish_requests: Any
        self._propose: Any
        self._mask: Any
        # This is for drafts that do not come from redraft's lookups. V2 calls its draft up to the
        # end of the context.
        self._proposer = (
            LOOKUP if getattr(runner.speculative_config, "method", "") in LOOKUP_METHODS else 0
        )
        self.state = find_state(runner, RunnerState)
        self._padded: frozenset[str] = frozenset()

    def add_requests(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        with self.capture.reporting("hook"):
            self._padded = find_padded(scheduler_output)
            for request in scheduler_output.scheduled_new_reqs:
                if request.sampling_params is not None and not request.req_id.startswith(
                    WARMUP_IDS
                ):
                    # In V2, a resumed request arrives as a new one. `Feed` keeps its first decision
                    # about it.
                    self.feed.add(request)

    def finish_requests(self, scheduler_output: Any) -> None:
        self._finish_requests(scheduler_output)
        with self.capture.reporting("hook"):
            for request_id in scheduler_output.finished_req_ids:
                self.feed.end(request_id)
            # Without tokens to read, nothing is sampled, so no step would report the ended requests
            # to capture.
            if not scheduler_output.total_num_scheduled_tokens:
                self.feed.flush()

    def mask(self, logits_RV: Tensor, batch: Any, request_ids: list[str], *args: Any) -> None:
        """Hook for the grammar's mask, which changes the logits before they reach the sampler."""
        with self.capture.reporting("hook"):
            self.feed.keep_unmasked(logits_RV, request_ids)
        self._mask(logits_RV, batch, request_ids, *args)

    def watch(self, sample: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a sampler's `__call__` to record the sampler's output."""

        def sample_and_take(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            output = sample(sampler, *args, **kwargs)
            self.sampled(output, *args, **kwargs)
            return output

        return sample_and_take

    def sampled(
        self,
        output: Any,
        logits_RV: Tensor,
        batch: Any,
        draft_logits: Any = None,
        invalid: Any = None,
    ) -> None:
        """Hook after a sampler.

        `draft_logits` [requests, J, V] exist only for probabilistic drafts.
        """
        with self.capture.reporting("hook"):
            kept_RV = self.feed.take_unmasked(logits_RV)
            self.feed.put(self._make_step(output, kept_RV, batch, draft_logits))

    def propose(self, *args: Any, **options: Any) -> Any:
        """Hook for the draft's proposal, whose arguments include the target's last hidden states.

        If the draft reads hidden states of the target's layers, the arguments include these too.
        """
        with self.capture.reporting("hidden_states"):
            if not options.get("dummy_run"):  # dummy runs pass their arguments by keyword
                last_ND, layers = args[3:5]
                self.feed.put_states(layers or [last_ND])
        return self._propose(*args, **options)

    def _make_step(
        self, output: Any, logits_RV: Tensor | None, batch: Any, draft_logits: Tensor | None
    ) -> EngineStep | None:
        """Create the step for a batch.

        A reference to the logits is enough, because V2's samplers change a copy.
        """
        infos = [self.feed.requests.get(request_id) for request_id in batch.req_ids]
        if not any(infos):  # the usual case if only a fraction of the requests is recorded
            if batch.req_ids[0].startswith(WARMUP_IDS):
                self._warm_up(logits_RV, batch, draft_logits)
            return self.feed.make_empty_step()
        # 1. Read the host's state. These are numpy arrays, so `tolist` does not wait.
        count = batch.num_reqs
        num_drafts_B = batch.num_draft_tokens_per_req
        # If the total on the host is 0, vLLM samples as if nothing had been drafted.
        is_drafted = num_drafts_B is not None and batch.num_draft_tokens
        num_drafts = num_drafts_B.tolist() if is_drafted else [0] * count
        ranges = None
        if batch.num_draft_tokens < sum(num_drafts):  # adaptive verification has omitted some
            # Copy them, because the next step writes to the same buffers.
            rows_B1, reads_B1 = batch.cu_num_logits, batch.query_start_loc[: count + 1]
            ranges = DeviceRanges(rows_B1.clone(), reads_B1.clone(), batch.num_tokens)
        first_reads = batch.query_start_loc_np[: count + 1].tolist()
        first_rows = batch.cu_num_logits_np[:count].tolist()
        num_read_B = batch.query_start_loc_np[1 : count + 1] - batch.query_start_loc_np[:count]
        num_prefilled_B = batch.num_computed_prefill_tokens_np[:count] + num_read_B
        foreign, own = {}, self._proposer
        if self.state.proposers:
            foreign, own = self.state.proposers.foreign, 0
        known = Batch(
            infos=infos,
            first_reads=first_reads,
            num_drafts=num_drafts,
            proposers=[
                PADDING if name in self._padded else foreign.get(name, own)
                for name in batch.req_ids
            ],
            first_rows=first_rows,
            first_drafts=[
                row + 1 for row in first_rows
            ],  # range of the ids read for the rows; the first id is not a draft token
            # This is correct while a prompt is read. `starts_B` has the values for other steps.
            starts=num_prefilled_B.tolist(),
            is_partial=(num_prefilled_B < batch.prefill_len_np[:count]).tolist(),
        )
        # 2. None of these requests is recorded, so at most the ends of other requests must be
        # reported.
        if not any(known.infos):
            return self.feed.make_step(
                known,
                sampled_BK=output.sampled_token_ids,
                logits_RV=None,
                draft_ids_S=None,
                draft_probs_S=None,
            )
        # 3. Read on the device, queued before the next step overwrites `input_ids` and `positions`.
        read_ids_R = batch.input_ids[batch.logits_indices]  # indexing makes copies, here and below
        first_rows_B = batch.cu_num_logits[:count].long()
        return self.feed.make_step(
            known,
            sampled_BK=output.sampled_token_ids,
            num_sampled_B=output.num_sampled,
            # If the last text token that was read is at position p, the first sampled token has
            # index p + 1.
            starts_B=batch.positions[batch.logits_indices[first_rows_B]] + 1,
            logits_RV=logits_RV,
            draft_ids_S=read_ids_R,
            draft_probs_S=None
            if draft_logits is None
            else self._read_draft_probs(batch, draft_logits, read_ids_R, known, ranges),
            ranges=ranges,
            confidences_BJ=self._read_confidences(batch) if is_drafted else None,
        )

    def _warm_up(self, logits_RV: Tensor | None, batch: Any, draft_logits: Tensor | None) -> None:
        """Compile the kernels of a recorded step while vLLM compiles its own.

        Otherwise, all requests would wait for them when the first recorded request arrives.
        """
        if logits_RV is None or not (self.feed.reduces or logits_RV.is_cuda):
            return
        find_in_one_pass(logits_RV, self.capture.config.logprobs)
        if draft_logits is not None:
            slots_B = batch.idx_mapping.long()
            zeros_B = torch.zeros_like(slots_B)
            gather_probs(draft_logits, slots_B, zeros_B, zeros_B, zeros_B.float())

    def _read_confidences(self, batch: Any) -> Tensor | None:
        """Return the draft's confidence in the tokens that this step verifies, [B, J].

        Return None without adaptive verification.
        """
        manager = getattr(self.runner, "adaptive_verification", None)
        if manager is None:
            return None
        # Until the draft proposes again, the confidences by slot belong to its last proposal.
        confidences: Tensor = manager._confidence_probs[batch.idx_mapping]
        return confidences

    def _read_draft_probs(
        self,
        batch: Any,
        draft_logits: Tensor,
        read_ids_R: Tensor,
        known: Batch,
        ranges: DeviceRanges | None = None,
    ) -> Tensor:
        """Return the draft's probability, [R], of each row's id at the request's temperature.

        The probability is 0 in rows without a draft token and in rows of requests that are not
        recorded. With `ranges`, it is not known yet which rows belong to which request. In this
        case, all rows are computed, and rows without a draft token have arbitrary values.
        """
        temperature_S = self.runner.sampler.sampling_states.temperature.gpu
        if ranges is not None:
            slots_R = batch.expanded_idx_mapping.long()
            drafts_R = (batch.expanded_local_pos.long() - 1).clamp(min=0)
            return gather_probs(
                draft_logits, slots_R, drafts_R, read_ids_R.long(), temperature_S[slots_R]
            )
        drafted = zip(known.infos, known.first_drafts, known.num_drafts, strict=True)
        rows = [
            row for info, first, count in drafted if info for row in range(first, first + count)
        ]
        # The copy starts from pinned memory and is not awaited. A plain copy to a GPU would wait
        # for all work queued there.
        pinned_N = torch.tensor(rows, dtype=torch.long, pin_memory=read_ids_R.is_cuda)
        rows_N = pinned_N.to(read_ids_R.device, non_blocking=True)
        slots_N = batch.expanded_idx_mapping.long()[rows_N]
        probs_R = torch.zeros(len(read_ids_R), device=read_ids_R.device)
        probs_R[rows_N] = gather_probs(
            draft_logits,
            slots_N,
            # Row j of a request reads draft token j - 1. Row 0 reads text.
            batch.expanded_local_pos.long()[rows_N] - 1,
            read_ids_R[rows_N].long(),
            # vLLM keeps the draft's logits from before the temperature is applied.
            temperature_S[slots_N],
        )
        return probs_R
