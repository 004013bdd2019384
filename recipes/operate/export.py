"""Convert a draft for a different engine, and print the command that serves it.

    $ redraft export outputs/eagle3/draft --engine sglang
    $ redraft export outputs/dspark/draft --engine tensorrt-llm --output drafts/dspark
    $ redraft export outputs/eagle3/draft --engine llama.cpp --gguf target.gguf

If an engine reads a head differently from training, it serves the same text with fewer accepted
tokens and reports no error. The draft is therefore checked first, and a part that the engine cannot
compute is refused with the reason. `redraft doctor --engine` checks a folder without writing one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.heads.engines.table import EngineName, find_engine


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    draft: Annotated[str, tyro.conf.Positional]
    """Folder or hub name of the draft. For an MTP layer inside the target, name the target."""
    engine: EngineName
    """Engine to write the draft for."""
    target: str | None = None
    """Folder or hub name of the served model. Default: the target in the draft's provenance.json.
    """
    gguf: Path | None = None
    """The target's GGUF file. A draft for llama.cpp takes its tokenizer from this file."""
    output: Path | None = None
    """Folder to write. Default: the draft's folder with the engine's name appended."""
    num_speculative_tokens: int | None = None
    """Number of draft tokens per step in the printed command. Default: the number used in the
    training's evaluation, otherwise 3.
    """
    overwrite: bool = False
    """Replace a folder that redraft wrote."""


def main(cfg: ExportConfig) -> None:
    """Check, convert and publish the draft, and print the command that serves it.

    Raises:
        FileExistsError: the output is not empty.
        FileNotFoundError: the draft or the target is missing.
        ValueError: the engine does not serve the draft, or the draft has a problem.
    """
    # Imported here, because they import torch.
    from redraft.files.folder import fetch_model
    from redraft.files.replaced import require_replaceable
    from redraft.files.target_folder import TargetFolder
    from redraft.heads.catalog import detect_family
    from redraft.heads.doctor.checks import static_findings
    from redraft.heads.doctor.pair import Pair
    from redraft.heads.engines.exporting import export_draft, require_exportable
    from redraft.heads.engines.table import Export
    from redraft.heads.provenance import read_provenance

    engine, folder = find_engine(cfg.engine), fetch_model(cfg.draft)
    output = cfg.output or Path(f"{cfg.draft.rstrip('/')}-{engine.name}")
    require_replaceable(output, cfg, overwrite=cfg.overwrite)
    family = detect_family(folder)
    engine.require_served(family)
    own = cfg.draft if family.is_in_target else None
    if not (name := cfg.target or own or read_provenance(folder).target):
        raise ValueError(f"{cfg.draft} does not contain the name of its target: set --target")
    pair = Pair.read(TargetFolder.open(name), folder)
    if family.is_in_target and not pair.is_own_target:
        raise ValueError(
            f"{cfg.draft} contains only an MTP layer, but engines read this layer from the target's "
            "folder: give the folder that `redraft train mtp` wrote"
        )
    num_tokens = pair.choose_tokens(cfg.num_speculative_tokens)
    found = static_findings(
        pair, method=None, num_speculative_tokens=num_tokens, engine=engine.name
    )
    for finding in found:
        if not finding.is_doubt:
            raise ValueError(f"{finding.problem}; {finding.cure}")
    if pair.is_own_target:
        require_exportable(engine, pair)
        export = Export(pair=pair, output=folder, num_tokens=num_tokens)
        print(f"nothing to write: {engine.title} reads the MTP layer from the target's folder")
    else:
        export = Export(pair=pair, output=output, num_tokens=num_tokens, gguf=cfg.gguf)
        export_draft(engine, export, overwrite=cfg.overwrite)
        print(f"written for {engine.proof}: {output}")
    print(f"serve it with:\n{engine.rules().serve(export)}")
