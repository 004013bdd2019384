"""Export a draft for an engine, and check whether an engine can serve a draft's folder."""

from functools import partial

from redraft.files.artifact import PROVENANCE, publish
from redraft.files.folder import read_json
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines.table import Engine, Export


def engine_findings(engine: Engine, pair: Pair) -> list[Finding]:
    """Report the parts of a draft that the engine does not serve or interprets differently.

    They do not change the generated text, because verification keeps it the target's. Only
    acceptance falls.
    """
    try:
        engine.require_served(pair.family)
    except ValueError as error:
        problem, _, cure = str(error).partition("; ")
        return [Finding(problem, cure)]
    rules = engine.rules()
    found = [*rules.find_refused(pair), *rules.find_misread(pair)]
    return [*found, *other_version(engine, engine.find_installed())]


def other_version(engine: Engine, installed: str) -> list[Finding]:
    """Report a doubt if the rules are based on a different release than the installed one."""
    if installed in ("", engine.version):
        return []
    return [
        Finding(
            f"{engine.title} {installed} is installed, but the rules are based on the loaders of "
            f"{engine.version}: the installed release may read this folder differently",
            f"install {engine.package}=={engine.version}, or compare the acceptance with a forecast",
            is_doubt=True,
        )
    ]


def require_exportable(engine: Engine, pair: Pair) -> None:
    """Raise ValueError with the first reason if the engine cannot compute the draft."""
    engine.require_served(pair.family)
    for finding in engine.rules().find_refused(pair):
        raise ValueError(f"{pair.draft}: {finding.problem}; {finding.cure}")


def export_draft(engine: Engine, export: Export, *, overwrite: bool) -> None:
    """Publish the draft in the engine's format, together with the draft's provenance.

    Raises:
        ValueError: the same as for `require_exportable`, or a tensor is missing, unknown or has the
            wrong shape.
        FileExistsError: the output is not empty, or contains files that redraft did not publish.
        OSError: the disk is full.
    """
    require_exportable(engine, export.pair)
    path = export.pair.draft / PROVENANCE
    earlier = read_json(path) if path.is_file() else {}
    made = {"engine": engine.name, "version": engine.version, "from": str(export.pair.draft)}
    write = partial(engine.rules().write, export)
    publish(export.output, write, {**earlier, "exported_for": made}, overwrite=overwrite)
