"""Hooks in vLLM's scheduler and runner: the policy chooses each step's number of draft tokens.

    schedule ─► dynamic_sd_lookup[requests] ─► number ─► worker: at 0 the draft is not called
    update_from_output ─► accepted tokens ┐
    post_step, with its draft ─► seconds ─┴─► Policy ─► redraft_pace ─► /redraft/status, /metrics
    CHANGING ─► Policy.swapped

vLLM's scheduler looks the number up in a table. `redraft serve --pace` gives vLLM a table with all
numbers, so that vLLM prepares for each of them. A `Pacer` then replaces the table.

At 0, a draft with a KV cache processes only prompts. It never writes KV cache entries for tokens
generated in the meantime, neither for this request nor for a later request that finds these tokens
in the prefix cache. In place of the missing entries, the draft attends to zeros or to finite
entries of an older request. This changes which tokens are drafted, and so acceptance (the effect
was not measured), but not the answers, because verification decides on each token. Only NaN in
probabilities would mislead verification. Memory after a sleep is undefined, so --enable-sleep-mode
is refused with sampled drafts. A request's acceptance counts, and a probe of more tokens starts,
only if the draft has processed the fraction READ of the request's tokens.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from redraft.engine.hooks import SchedulerState, find_state
from redraft.engine.patches import reads_prompt
from redraft.engine.settings import read_settings
from redraft.online.engine.config import TABLE, check_pace, make_table, read_config
from redraft.online.engine.pace_memory import PaceMemory, open_memory
from redraft.online.engine.pace_policy import Policy

logger = logging.getLogger("vllm.redraft")

CHANGING = (
    "redraft_commit",
    "redraft_load_target",
    "redraft_move",
    "finish_weight_update",
    "reload_weights",
)
"""Worker calls that change the draft or the target."""

# Fraction of a request's tokens that the draft must have processed before the request's acceptance
# counts.
READ = 0.9


def find_decider(vllm_config: Any) -> str:
    """Return why a `Pacer` cannot choose the number of draft tokens; empty if it can."""
    speculative = vllm_config.speculative_config
    if not speculative or not speculative.num_speculative_tokens:
        return "nothing is drafted"
    # With data parallelism, vLLM itself drops the table, so check this first.
    if vllm_config.parallel_config.data_parallel_size > 1:
        return (
            "data-parallel replicas must draft the same number of tokens: start one server per "
            "replica"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return (
            "pipeline stages compute several batches in turn, and the drafts of these batches come "
            "from different steps"
        )
    if speculative.use_ngram_gpu() and not vllm_config.use_v2_model_runner:
        return "ngram_gpu must process every step: use ngram instead"
    is_sampled = speculative.draft_sample_method == "probabilistic"
    if is_sampled and keeps_keys(speculative) and vllm_config.model_config.enable_sleep_mode:
        return "sampled drafts need an intact KV cache after a sleep: remove --enable-sleep-mode"
    table, own = (
        speculative.num_speculative_tokens_per_batch_size,
        make_table(
            speculative.num_speculative_tokens,
            is_adaptive=speculative.enable_adaptive_verification,
        ),
    )
    if not table:
        return f'give "{TABLE}": {own} in the speculative config'
    return "" if [list(row) for row in table] == own else f"{TABLE} decides"


def keeps_keys(speculative: Any) -> bool:
    """Whether the draft has its own KV cache and must process the whole context itself."""
    if speculative.use_gemma4_mtp():  # this draft attends to the target's KV cache
        return False
    return bool(speculative.use_eagle() or speculative.uses_draft_model())


class Pacer:
    """Replaces the scheduler's table: `pacer[requests]` is the number for the next step.

    vLLM counts all requests in a step, including requests in prefill (vllm-project/vllm#49548).
    Here, the count is for the step that verifies the drafts: `survey` returns how many requests
    will then still be in prefill, and the mean sequence length of the others.
    """

    def __init__(
        self,
        most: int,
        max_requests: int,
        max_context: int,
        pace: str,
        *,
        has_keys: bool,
        is_adaptive: bool = False,
        survey: Callable[[], tuple[int, float]] = lambda: (0, 1.0),
    ) -> None:
        self.most = most
        self.survey = survey
        self.has_keys = has_keys
        self.is_adaptive = is_adaptive  # Whether vLLM chooses how many draft tokens are verified.
        self.policy = Policy(most, max_requests, max_context, is_adaptive=is_adaptive)
        # Number of output tokens that the draft has not processed, by request.
        self.unread: dict[str, int] = {}
        # Whether the draft had processed most of the requests' tokens in the latest step.
        self._is_read = True
        self.memory: PaceMemory | None = None  # Saves the policy for the next start.
        self._drafted = self._verified = 0
        self._done_s = 0.0
        self._observe: Callable[[float], None] | None = None
        self.drafts = False
        """Whether the draft computes after the newest step."""
        self.set(pace)

    def set(self, pace: str) -> None:
        """Set the pace from the next step on: `auto`, or a number, which is capped at `most`.

        `off` means `most`, as without a pacer. `adaptive` means `most` too; vLLM then verifies only
        some of the tokens.
        """
        is_most = pace in ("off", "adaptive")
        number = self.most if is_most else None if pace == "auto" else int(pace)
        self.fixed = None if number is None else min(number, self.most)
        self.pace = "auto" if number is None else str(self.fixed)

    def __getitem__(self, num_requests: int) -> int:
        self._verified = self._drafted
        if self.fixed is not None:
            self._drafted = self.fixed
            return self._drafted
        num_reading, context = self.survey()
        requests = max(1, num_requests - num_reading)
        self._drafted = self.policy.choose(requests, context, is_read=self._is_read)
        return self._drafted

    def swapped(self, version: str) -> None:
        """Record a change of the draft or the target. `version` is empty if its name is unknown."""
        self.policy.swapped()
        if self.memory is not None:
            self.memory.version = version

    def has_read(self, request_id: str, request: Any) -> bool:
        """Whether the draft has processed enough tokens for the request's acceptance to count."""
        return bool(self.unread.get(request_id, 0) <= (1 - READ) * request.num_tokens)

    def begin(self, output: Any, now_s: float) -> None:
        """Record that a step has been scheduled."""
        for request_id in (
            *output.finished_req_ids,
            *(new.req_id for new in output.scheduled_new_reqs),
        ):
            self.unread.pop(request_id, None)  # the V2 runner restarts preempted requests
        self.drafts = self._drafted > 0 or (self.has_keys and reads_prompt(output))
        if output.num_scheduled_tokens:
            output.redraft = self._drafted, self._verified, now_s

    def end(self, output: Any, result: Any, requests: Any) -> None:
        """Record the result of a step. The step ends when `finish` is called.

        `requests` contains the scheduler's requests by id, before the scheduler adds this step's
        tokens.
        """
        if not hasattr(output, "redraft"):
            return
        drafted, verified, begin_s = output.redraft
        is_clean, sampled = not reads_prompt(output), result.sampled_token_ids
        num_read, num_decoding, num_tokens, length, accepted = 0, 0, 0, 0, list[int]()
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is not None and request.is_finished():
                request = None  # it ended, and waits only for a KV connector
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            # Skip the request's prefill step. A request that no longer exists ended in the previous
            # step.
            is_decoding = num_scheduled == 1 + num_drafts and (
                request is None or request.num_output_tokens > 0
            )
            num_decoding += is_decoding
            num_new = len(sampled[result.req_id_to_index[request_id]]) if sampled else 0
            if request is None:
                # Without drafts, the request would also have ended one step later.
                num_tokens += is_decoding
                continue
            # A lookup that found nothing counts as a draft without success. So do tokens past the
            # end of the answer, which no client gets.
            num_given = min(num_new, max(1, request.max_tokens - request.num_output_tokens))
            if is_decoding:
                num_tokens += num_given
                length += request.num_tokens
            if not num_new:
                continue
            is_read = self.has_read(request_id, request)
            num_read += is_read
            if verified and is_read and is_decoding:
                accepted.append(num_given - 1)
            if self.has_keys and is_clean and not drafted:
                self.unread[request_id] = self.unread.get(request_id, 0) + num_new
        num_requests = len(output.num_scheduled_tokens)
        self._is_read = 2 * num_read >= num_requests
        context = length / max(1, num_decoding)

        def observe(now_s: float) -> None:
            # If steps are scheduled ahead, this step began when the previous one was done.
            seconds, self._done_s = now_s - max(begin_s, self._done_s), now_s
            if self.fixed is not None:
                return
            self.policy.observe(
                num_decoding,
                context,
                drafted,
                verified,
                seconds,
                accepted,
                tokens=num_tokens,
                num_reading=num_requests - num_decoding,
            )
            if self.memory is not None:
                self.memory.note(self.policy, now_s)

        self._observe = observe

    def finish(self, now_s: float) -> None:
        """Record the end of a step, including the draft tokens for the next one."""
        if self._observe is not None:
            self._observe(now_s)
            self._observe = None

    def status(self) -> dict[str, Any]:
        """Return the pace and its effect.

        `gain` is this server's speed in recent steps, relative to the same requests without drafts;
        both include the time that clients wait for prompts. Each cell contains the chosen number
        and its speed in steps that read no prompt. Speeds have a 95% interval. `explored` is the
        fraction of time lost in probes.
        """
        policy = self.policy
        found: dict[str, Any] = {"pace": self.pace, "cells": []}
        found |= {"adaptive": True} if self.is_adaptive else {}
        if self.fixed is not None:
            return found
        for cell in sorted(policy.steps):
            about = {**cell._asdict(), "tokens": policy.base[cell], "steps": policy.steps[cell]}
            found["cells"].append(about | policy.speed(cell, policy.base[cell]).interval())
        explored = max(0.0, policy.lost_s) / (policy.busy_s or math.inf)
        return found | {"gain": policy.recent.gain.interval(), "explored": explored}


def is_paced() -> bool:
    """Whether the environment sets a pace.

    Raises:
        ValueError: the pace is invalid.
    """
    return check_pace(read_settings().get("pace", "off")) != "off"


def install_pacer(scheduler: Any, pace: str) -> None:
    """Install a `Pacer` in this scheduler if possible, and log how draft tokens are chosen."""
    state = find_state(scheduler, SchedulerState)
    speculative = scheduler.vllm_config.speculative_config
    is_adaptive = bool(speculative and speculative.enable_adaptive_verification)
    if is_adaptive:
        logger.info(
            "redraft: --pace %s: vLLM decides how many draft tokens each step verifies", pace
        )
    if decider := find_decider(scheduler.vllm_config):
        if not is_adaptive or pace != "adaptive":
            logger.warning("redraft: --pace %s is off: %s", pace, decider)
        if (
            scheduler.dynamic_sd_lookup and TABLE not in decider
        ):  # vLLM must not use the table of all numbers
            scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * len(
                scheduler.dynamic_sd_lookup
            )
        return
    most, has_keys = scheduler.num_spec_tokens, keeps_keys(speculative)
    max_requests = scheduler.scheduler_config.max_num_seqs
    max_context = scheduler.vllm_config.model_config.max_model_len
    pacer = Pacer(
        most,
        max_requests,
        max_context,
        pace,
        has_keys=has_keys,
        is_adaptive=is_adaptive,
        survey=partial(survey, scheduler),
    )
    pacer.memory = open_memory(read_config().registry, scheduler.vllm_config)
    if pacer.memory is not None and pacer.memory.recall(pacer.policy):
        logger.info("redraft: --pace continues with %s", pacer.memory.path)
    state.pacer = scheduler.dynamic_sd_lookup = pacer
    logger.info(
        "redraft: --pace %s chooses the number of draft tokens per step, at most %d", pace, most
    )
    off = "only reads prompts" if has_keys else "is not called"
    logger.info(
        "redraft: --pace at 0 tokens: the draft %s, and decoding steps run only the target", off
    )


def survey(scheduler: Any) -> tuple[int, float]:
    """Return the number of requests with long prompts, and the others' mean sequence length.

    A prompt is long if more of its tokens remain than one step processes.
    """
    most = scheduler.max_num_scheduled_tokens
    most = min(most, scheduler.scheduler_config.long_prefill_token_threshold or most)
    lengths = [
        request.num_tokens
        for request in scheduler.running
        if request.num_prompt_tokens - request.num_computed_tokens <= most
    ]
    return len(scheduler.running) - len(lengths), sum(lengths) / max(1, len(lengths))


def find_pacer(engine: Any) -> Pacer | None:
    """Return the pacer of an engine core, or None."""
    state: SchedulerState | None = getattr(getattr(engine, "scheduler", None), "redraft", None)
    return state.pacer if state else None


def answer_pace(engine: Any, pace: str = "") -> dict[str, Any] | None:
    """Set an engine's pace, if given, and return the pacer's status; None if it has no pacer."""
    pacer = find_pacer(engine)
    if pacer is None:
        return None
    if pace and not (pace == "adaptive" and not pacer.is_adaptive):
        pacer.set(check_pace(pace))
    return pacer.status()


def install(runner: Any) -> None:
    """Make a runner skip the draft at 0 draft tokens. It is safe to call again."""
    if find_decider(runner.vllm_config):
        return
    if runner.vllm_config.use_v2_model_runner:
        from redraft.online.engine.runner_v2 import install_pace
    else:
        from redraft.online.engine.runner_v1 import install_pace
    install_pace(runner, has_keys=keeps_keys(runner.speculative_config))
