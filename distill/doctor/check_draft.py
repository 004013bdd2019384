"""Check that a draft gets the same inputs in serving as in training.

The checks cover the folder, the labels, and the real engine.

static      configs, headers, tensors, provenance                  heads.doctor.checks
labels      the loss mask recorded in training                     distill.doctor.label_probe
numeric     vLLM's drafter against the draft's training steps      eval.parity.compare
acceptance  in vLLM, against the published forecast                eval.parity.acceptance
readings    would a different reading of the weights accept more?  distill.doctor.readings
"""

from dataclasses import dataclass, field

from redraft.distill.doctor.in_engine import EngineCheck, day_of_training, judge_dump, plan_run
from redraft.distill.doctor.label_probe import compare_probes, label_probe
from redraft.engine.parity.run import run_engine
from redraft.engine.server import describe_hits, require_runner
from redraft.files.folder import model_folder
from redraft.files.target_folder import TargetFolder
from redraft.heads.doctor.checks import notes, static_findings
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines.exporting import engine_findings
from redraft.heads.engines.table import find_engine


@dataclass(kw_only=True)
class Checked:
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Checks that could not be run, with the reason."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_doubt]


def check_draft(
    target: str,
    draft: str,
    *,
    method: str | None,
    num_speculative_tokens: int | None,
    engine: EngineCheck | None,
    engine_name: str = "vllm",
) -> Checked:
    """Run all checks of a draft; without `engine`, check only its folder.

    By default, `method` is the family's, and the number of tokens is the one in the provenance, or
    3. For an engine other than vLLM, the draft is checked against the rules of the engine's row in
    `heads.engines.table`.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: a folder is corrupt or contains no draft.
    """
    pair = Pair.read(TargetFolder.open(target), model_folder(draft))
    checked, num_tokens = check_folder(pair, method, num_speculative_tokens, engine_name)
    if engine is None or not _may_run(pair, checked):
        return checked
    plan = plan_run(pair, num_tokens, engine)
    checked.notes += plan.notes
    try:
        (dump,) = run_engine([plan.run], engine.folder)
    except ChildProcessError as error:
        checked.findings.append(
            Finding(str(error), "fix the problem that the engine reports, or read its log")
        )
        return checked
    judged = list(judge_dump(pair, plan, dump, checked.facts))
    checked.findings += [each for each in judged if isinstance(each, Finding)]
    checked.notes += [each for each in judged if isinstance(each, str)]
    return checked


def check_folder(
    pair: Pair, method: str | None, num_speculative_tokens: int | None, engine_name: str = "vllm"
) -> tuple[Checked, int]:
    num_tokens = pair.choose_tokens(num_speculative_tokens)
    findings = static_findings(
        pair, method=method, num_speculative_tokens=num_tokens, engine=engine_name
    )
    row = find_engine(engine_name)
    findings += engine_findings(row, pair)
    checked = Checked(findings=findings, notes=list(notes(pair)))
    checked.facts |= {
        "target": str(pair.target.folder),
        "draft": f"{pair.draft}: {pair.family.name}, {num_tokens} tokens a step",
        "prefix cache": describe_hits(method or pair.family.method),
        **({} if row.name == "vllm" else {"engine": row.proof}),
    }
    _check_labels(pair, checked)
    return checked, num_tokens


def _check_labels(pair: Pair, checked: Checked) -> None:
    trained = pair.provenance.label_probe
    if trained is None:
        checked.notes.append(
            "its provenance has no label_probe, so the template and loss mask used in training "
            "are unknown"
        )
        return
    served = label_probe(pair.target.tokenizer, day_of_training(pair))
    if served is not None:
        checked.findings += compare_probes(trained, served)


def _may_run(pair: Pair, checked: Checked) -> bool:
    try:
        require_runner({**pair.family.speculative, "model": str(pair.draft)})
    except ValueError as error:
        checked.notes.append(f"the draft was not run in the engine: {error}")
        return False
    if pair.family.parity is None:
        checked.notes.append(
            f"a {pair.family.title} drafter's passes in vLLM cannot be recorded, so it "
            "was not run there"
        )
        return False
    if checked.problems:
        checked.notes.append("the draft was not run in the engine: fix the problems below first")
        return False
    return True
