"""The same drafts in a real vLLM: what its counters say of every prompt, at every temperature, from one server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eval.acceptance import AcceptanceCounts
from eval.drafts import LoadedTarget, NamedDraft
from eval.engine import Output, measurable, measure, vllm_server
from eval.kept import kept
from eval.prompts import Prompt
from eval.report import served_on
from eval.teacher_forced import Protocol
from heads.check_static import first_cure

Served = list[list[AcceptanceCounts]]
"""By temperature, in the order of the prompts: what the engine counted."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    concurrency: int = 4
    """Requests the engine serves at a time."""
    args: tuple[str, ...] = ()
    """Passed through to vLLM, e.g. --tensor-parallel-size 8."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its environment."""


def serve_and_count(
    target: LoadedTarget,
    draft: NamedDraft,
    num_speculative_tokens: int,
    prompts: Sequence[Prompt],
    protocol: Protocol,
    options: EngineOptions,
    folder: Path,
) -> Served:
    """The engine's counts of every prompt's drafts; kept in `folder`, so that a killed run does not serve it again.

    Raises: ChildProcessError with the engine's own message and, where the draft's folder tells it, the cure;
    ConnectionError where the server went away.
    """
    assert draft.speculative is not None, "there is an engine that serves it"
    config = {**measurable(draft.speculative), "num_speculative_tokens": num_speculative_tokens}

    def counted() -> Served:
        with vllm_server(
            draft.served or target.name,
            log=folder / f"vllm-{draft.name}-{num_speculative_tokens}.log",
            speculative_config=config,
            max_model_len=max(len(p.token_ids) for p in prompts) + protocol.max_tokens + num_speculative_tokens,
            extra_args=options.args,
            extra_env=options.env,
        ) as server:
            runs = [
                measure(
                    server,
                    prompts,
                    max_tokens=protocol.max_tokens,
                    temperature=temperature,
                    concurrency=options.concurrency,
                )
                for temperature in protocol.temperatures
            ]
        return [[_counts(output, by_step=draft.forecast is None) for output in run.outputs] for run in runs]

    key = [target.fingerprint, draft.fingerprint, config, prompts, protocol.temperatures, protocol.max_tokens]
    key += [options.args, options.concurrency, served_on()]
    try:
        return kept(folder, f"engine-{draft.name}-{num_speculative_tokens}", key, Served, counted)
    except ChildProcessError as error:
        cure = first_cure(target.folder, draft.folder, num_speculative_tokens) if draft.folder else ""
        raise ChildProcessError(f"{draft.name}: {error}{cure}") from error


def _counts(output: Output, *, by_step: bool) -> AcceptanceCounts:
    """What was counted; `by_step`: with a draft of nothing for each target step that had none, which vLLM does not
    count. Others are set beside a forecast of their drafts."""
    counts = output.counts
    assert counts is not None, "the server speculates"
    num_steps = len(output.token_ids) - 1 - sum(counts.accepted_per_position)
    return replace(counts, num_drafts=max(counts.num_drafts, num_steps)) if by_step else counts
