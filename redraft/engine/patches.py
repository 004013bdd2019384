"""Patches of vLLM for every server that redraft starts. Most of them concern the CPU build.

In vLLM, the engine core and its workers wait for each other by calling `sched_yield` in a loop. If
another thread of the same priority is runnable, each call gives the core away until the next kernel
tick, i.e. for 4 ms at 250 Hz. On a machine with two cores, such threads belong to the API server
and to capture. A thread of the same process may not even get the interpreter lock, and then
requests are served one after another. These patches let the waiting thread sleep, because a
sleeping thread is woken at once. The waiting thread must not call `sched_yield` as well, because
Linux's scheduler would then run it later.
"""

import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from redraft.engine.hooks import RunnerState, after_start, around, find_state, hook, hooked
from redraft.engine.process import LIBC

# vLLM's function that copies weights at the end of `load_weights`.
BUILD = "_build_fused_kv_buffers"

PR_SET_TIMERSLACK = 29  # option of prctl(2)

SLEEP_S = 20e-6
"""Minimum time that a waiting process sleeps, in seconds."""

LONGEST_SLEEP_S = 500e-6

LATE = 0.01
"""Length of a sleep as a fraction of the wait so far. On average, the end of a wait is noticed with
a delay of half a sleep.
"""

NEW_WAIT_S = 200e-6
"""Time since the last sleep, in seconds, after which a new wait begins. A check for a message takes
less time.
"""

SLACK_NS = 1000
"""Maximum delay with which Linux may end a sleep, in nanoseconds; 50,000 by default."""

# Time in seconds for connections to close after the engine has stopped. Complete answers need
# milliseconds.
ENDING_S = 5


def replace_expand_kernel(_: Any) -> Callable[..., None]:
    """Return a kernel that repeats each request's temperature, top-p and top-k per draft token.

    vLLM's replacement for machines without Triton passes an int64 *copy* of any other output tensor
    to the C++ kernel and never copies it back. The float outputs remain uninitialised memory, so
    even a copy of the target as draft is accepted at random, and the text is wrong too.
    """
    return expand_kernel


def skip_no_rows(apply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Make `apply_top_k_only` work on zero rows as well.

    In a step that verifies nothing, vLLM's version computes the maximum top-k over zero rows, and
    the exception crashes the engine. A single request with `top_k` but without `top_p` triggers it.
    """
    return lambda logits, k: apply(logits, k) if len(logits) else logits


def expand_kernel(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Write `input_val[r]` to `output` once per token of request r.

    A value equal to `replace_from` becomes `replace_to`.
    """
    values_B = torch.where(
        input_val == replace_from, torch.as_tensor(replace_to, dtype=input_val.dtype), input_val
    )
    # `cu_num_tokens` is inclusive: [2, 5, 6] means 2 tokens, then 3, then 1.
    counts_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values_B.repeat_interleave(counts_B))


def release_outside_traces(release: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run `release` on real tensors even while torch is tracing.

    EAGLE drafts in a compiled server need this.

    A draft that adopts the target's embedding or output head drops its own, along with a oneDNN
    handle. Python may collect the handle while torch traces the draft. The handle's finaliser reads
    a tensor, torch formats that tensor for an error message, and the formatting reads it again,
    until the stack overflows and the engine crashes.
    """

    def outside(handler: Any) -> None:
        keys = torch._C._PreserveDispatchKeyGuard()
        with (
            keys,
            no_python_dispatcher(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):
            # This is set while a fake tensor is computed.
            torch._C._set_meta_in_tls_dispatch_include(False)
            # vLLM's copies for tracing (fake tensors, or tensors on the meta device) have no
            # address.
            if type(handler.handler_tensor) is Tensor and not handler.handler_tensor.is_meta:
                release(handler)

    return outside


RmsNorm = Callable[[Tensor, Tensor, Tensor | None, float], None]


def with_groups(rms_norm: RmsNorm) -> RmsNorm:
    """Extend `rms_norm(out, input, weight, epsilon)` to weights with several rows.

    Such weights have one row per index of the first dimension.

    vLLM normalises the context keys of all layers of a DFlash draft in one call, with one row of
    weights per layer. The GPU kernel selects the row by layer. The CPU kernel uses the first row
    for all layers, so all later layers silently attend to wrong keys. vLLM's model calls
    `ops.rms_norm` through the module, so a wrapper takes effect even if the model was imported
    earlier.
    """

    def grouped(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            rms_norm(out, input, weight, epsilon)
            return
        # [L, context, heads, head_dim] is multiplied by weights [L, 1, 1, head_dim].
        wide = input.to(torch.float32)
        shape = [len(weight), *[1] * (input.dim() - 2), weight.shape[1]]
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        out.copy_(normed.to(input.dtype) * weight.view(shape))

    return grouped


class Sleeps(threading.local):
    """Sleeps that become longer while a thread waits.

    Starting and ending a sleep of 20 us takes the CPU nearly as long as the sleep itself, so the
    engine core would take half a core from the API server and the learner. A wait lasts as long as
    a target step, and sleeps of 1% of it delay the step by only 0.5%.
    """

    began_s = 0.0
    ended_s = 0.0

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s - self.ended_s > NEW_WAIT_S:
            self.began_s = now_s
        time.sleep(min(max(SLEEP_S, LATE * (now_s - self.began_s)), LONGEST_SLEEP_S))
        self.ended_s = time.monotonic()


def with_sleeps(_sched_yield: Callable[[], None]) -> Callable[[], None]:
    """Replace `sched_yield` with short sleeps in this process."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_TIMERSLACK, SLACK_NS)  # later threads inherit it
    return Sleeps()


def shutdown_in_time(shutdown: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """Limit the time for which `shutdown` of vLLM's API server waits for connections.

    Otherwise, the server never stops after SIGTERM if a client has sent only half a request or does
    not read its response.
    """

    async def bounded(self: Any, sockets: Any = None) -> None:
        self.config.timeout_graceful_shutdown = ENDING_S
        await shutdown(self, sockets)

    return bounded


def without_fused_buffers(block: Any) -> AbstractContextManager[None]:
    """Prevent a block draft's `load_weights` from making copies of its weights."""
    return hooked(block, "reload", **{BUILD: lambda _: lambda: None})


class LateDrafts:
    """Computes the proposals of one V1 runner after the tokens of a step have left the worker.

        execute_model ─► sample_tokens ─► tokens to the client
                                            └─► take_draft_token_ids ─► propose ─► next step

    vLLM's V1 runner proposes within `sample_tokens`. A first token then waits until the draft has
    read the prompt, and each token until the draft tokens after it are computed. The engine core
    sends the tokens, and only then asks for the draft tokens (`EngineCore.post_step`), so the
    runner can compute them at that time: its inputs do not change until the next `execute_model`. A
    step takes as long as before.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._waiting: list[Callable[[], None]] = []
        self._propose: Any
        self._take: Any
        self._execute_model: Any
        hook(
            runner,
            "late_drafts",
            propose_draft_token_ids=around(self, "_propose", self.propose),
            take_draft_token_ids=around(self, "_take", self.take),
            execute_model=around(self, "_execute_model", self.execute_model),
        )

    def propose(self, scheduled: Any, sampled: Any, *rest: Any) -> Any:
        if not (scheduled.num_spec_tokens_to_schedule or reads_prompt(scheduled)):
            return self._propose(scheduled, sampled, *rest)
        self._waiting = [partial(self._draft, scheduled, sampled, *rest)]
        return [[] for _ in sampled]  # a list, so that vLLM copies nothing to the host yet

    def then(self, call: Callable[[], None]) -> None:
        """Call a function after this step's proposal, or at once if no proposal is pending."""
        if self._waiting:
            self._waiting.append(call)
        else:
            call()

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def take(self) -> Any:
        self.finish()
        return self._take()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # Discard a proposal that was not fetched, because its inputs are about to be overwritten.
        self.finish()
        return self._execute_model(*args, **kwargs)

    @torch.inference_mode()
    def _draft(self, scheduled: Any, *args: Any) -> None:
        self.runner._draft_token_ids = self._propose(scheduled, *args)
        self.runner._copy_draft_token_ids_to_cpu(scheduled)


def reads_prompt(output: Any) -> bool:
    """Whether a step reads more than the last token and the draft tokens of each request."""
    drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return bool(output.total_num_scheduled_tokens > len(output.num_scheduled_tokens) + drafts)


def install_late(runner: Any) -> None:
    """Make a V1 runner draft after its tokens are sent. It is safe to call this again."""
    config = runner.vllm_config
    state = find_state(runner, RunnerState)
    if state.late is None and can_draft_late(config):
        state.late = LateDrafts(runner)


def can_draft_late(config: Any) -> bool:
    """Whether draft tokens are fetched after each step and nothing else waits for the draft.

    With asynchronous scheduling, the engine core fetches no draft tokens. A KV connector saves the
    draft's keys within the step. A data-parallel replica without a draft runs an empty one when the
    other replicas draft, at the same point of a step.
    """
    parallel = config.parallel_config
    return bool(
        config.speculative_config
        and not config.use_v2_model_runner
        and not config.scheduler_config.async_scheduling
        and not config.kv_transfer_config
        and parallel.data_parallel_size == 1
        and parallel.pipeline_parallel_size == 1
    )


install_late_drafts = after_start(lambda worker: install_late(worker.model_runner))
"""Wrapper around a worker's start-up that makes its runner draft after sending the tokens, if it
can.
"""


def after_draft(runner: Any, call: Callable[[], None]) -> None:
    """Call a function after this step's proposal, or at once if the runner does not delay it."""
    late = find_state(runner, RunnerState).late
    if late is None:
        call()
    else:
        late.then(call)
