"""Count a draft's accepted tokens in a real vLLM: all prompts and temperatures, on one server."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.lookups import depends_on_load
from redraft.engine.machine import engine_environment
from redraft.engine.measure import Output, measure
from redraft.engine.prompts import Prompt
from redraft.engine.server import forget_requests, vllm_server
from redraft.eval.forecast.drafts import NamedDraft
from redraft.eval.forecast.teacher_forced import Protocol
from redraft.files.kept import compute_once
from redraft.heads.doctor.checks import first_cure
from redraft.heads.target import LoadedTarget

# Indexed by [temperature][prompt], in the order of the prompts.
CountsByTemperature = list[list[AcceptanceCounts]]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    concurrency: int = 4
    """Number of concurrent requests."""
    dtype: str | None = None
    """Dtype of the weights. By default, `vllm_server` chooses it."""
    args: tuple[str, ...] = ()
    """Additional arguments for vLLM, e.g. --tensor-parallel-size 8."""
    forecast: bool = True
    """Whether there are forecasts to compare the counts with."""


def serve_and_count(
    target: LoadedTarget,
    draft: NamedDraft,
    num_speculative_tokens: int,
    prompts: Sequence[Prompt],
    protocol: Protocol,
    options: EngineOptions,
    folder: Path,
) -> CountsByTemperature:
    """Return the engine's counts for every prompt.

    They are cached in `folder`, so a run resumed after a kill does not serve the draft again.

    Raises:
        ChildProcessError: the engine died; the message is the engine's, with a fix if the draft's
            folder suggests one.
        ConnectionError: the server stopped responding.
    """
    assert draft.speculative is not None, "vLLM can serve it"
    is_compared = options.forecast and draft.forecast is not None
    if is_compared and depends_on_load(draft.speculative):
        # The forecast assumes one request per step.
        options = replace(options, concurrency=1)
    config = {
        **forget_requests(draft.speculative),
        "num_speculative_tokens": num_speculative_tokens,
    }

    def counted() -> CountsByTemperature:
        with vllm_server(
            draft.served or target.files.name,
            log=folder / f"vllm-{draft.name}-{num_speculative_tokens}.log",
            speculative_config=config,
            # Leave room for one more block: near the end of the window, vLLM's drafter stops
            # proposing.
            max_model_len=max(len(p.token_ids) for p in prompts)
            + protocol.max_tokens
            + num_speculative_tokens,
            dtype=options.dtype,
            extra_args=options.args,
        ) as server:
            runs = [
                measure(
                    server,
                    prompts,
                    max_tokens=protocol.max_tokens,
                    sampling=protocol.filters.at(temperature),
                    concurrency=options.concurrency,
                )
                for temperature in protocol.temperatures
            ]
        return [
            [_counts(output, by_step=not is_compared) for output in run.outputs] for run in runs
        ]

    # The key has everything that the counts depend on. Otherwise, a different run's counts could be
    # reused.
    key: list[object] = [target.files.fingerprint, draft.fingerprint, config, prompts]
    key += [protocol.temperatures, protocol.filters, protocol.max_tokens]
    key += [options, engine_environment()]
    try:
        return compute_once(
            folder,
            f"engine-{draft.name}-{num_speculative_tokens}",
            key,
            CountsByTemperature,
            counted,
        )
    except ChildProcessError as error:
        cure = (
            first_cure(target.files.folder, draft.folder, num_speculative_tokens)
            if draft.folder
            else ""
        )
        raise ChildProcessError(f"{draft.name}: {error}{cure}") from error


def _counts(output: Output, *, by_step: bool) -> AcceptanceCounts:
    """The counts for one request.

    Counts to be compared with a forecast are per draft. All other counts are `by_step`.
    """
    assert output.counts is not None, "the server speculates"
    return count_steps(output) if by_step else output.counts


def count_steps(output: Output) -> AcceptanceCounts:
    """The counts for one request, with an empty draft for each target step that had no draft.

    vLLM does not count those steps.
    """
    counts = output.counts or AcceptanceCounts.zero()
    # The prefill produces one token, and every step its accepted tokens and one more. The last
    # block may accept tokens beyond the end of the answer, and then the difference is too small by
    # at most K steps.
    num_steps = len(output.token_ids) - 1 - sum(counts.accepted_per_position)
    return replace(counts, num_drafts=max(counts.num_drafts, num_steps))
