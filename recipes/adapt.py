"""Adapt a draft to a different version of the target: a fine-tune, or a later checkpoint.

$ redraft adapt outputs/eagle3/draft --target models/finetuned --data.source answers.jsonl
$ redraft adapt outputs/eagle3/draft --target models/finetuned     # generates the answers first

The old draft and a new one are compared on held-out answers of the new target. The better of the
two is trained until acceptance stops rising (--loop.stop-by, --loop.minutes). The result is
published in --output/draft if its gain over the old draft is significant: the 95% interval, over
held-out prompts, is above 0. Otherwise, the old draft stays. --output/adapt.json contains the
verdict, the forecasts and the interval. The best data are answers of the new target. Without
--data.source, the new target first answers the questions of OLD's training data. All other settings
are the same as for `redraft train`. After a kill, run the same command again to continue.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.distill.train.run_config import HeadConfig, StandaloneConfig, make_config
from redraft.files.folder import fetch_model, read_config, tensor_entries
from redraft.heads.catalog import detect_family
from redraft.heads.family import Family
from redraft.heads.options import Standalone
from redraft.heads.provenance import read_provenance
from redraft.recipes.cli.run import Recipe
from redraft.recipes.cli.wrapping import wrap_prose
from redraft.recipes.train import COMMON

# Steps between two evaluations: adapting takes far fewer steps than training from scratch.
EVAL_EVERY = 50


def choose_recipe(args: Sequence[str], prog: str) -> tuple[Recipe, Sequence[str]]:
    """Return the recipe for the draft that the first argument names, and the other arguments.

    Raises:
        FileNotFoundError, ValueError: the first argument is not a trained draft.
        SystemExit: the help was printed.
    """
    if not args or args[0] in ("-h", "--help", "--help-all"):
        usage = f"usage: {prog} OLD --target TARGET [--data.source DATA] [flags]"
        flags = f"`{prog} OLD --help` prints the common flags of OLD's family, and --help-all all flags."
        print(f"{usage}\n\n{wrap_prose(__doc__)}\n\n{wrap_prose(flags)}")
        raise SystemExit(0)
    if args[0].startswith("-"):
        raise ValueError(f"{prog} needs OLD, the folder of an exported draft, before {args[0]}")
    old = fetch_model(args[0])
    if not old.is_dir():
        raise FileNotFoundError(
            f"{old} contains no draft: give the folder or the hub name of an exported draft"
        )
    read_config(old)  # for a run's folder, the error names its draft
    family = detect_family(old)
    if family.training is None:
        raise ValueError(
            f"{old} contains {family.title}, which are not trained: recreate them from the "
            f"target's answers"
        )
    recipe = Recipe(
        main=functools.partial(main, family, old),
        config_type=HeadConfig if family.is_head else StandaloneConfig,
        default=_defaults(family, old),
        description=f"Adapt {old} ({family.title}) to another version of the target.",
        common=COMMON,
        prog=f"{prog} {old}",
    )
    return recipe, args[1:]


def _defaults(family: Family, old: Path) -> Any:
    cfg = make_config(family)
    shared: dict[str, Any] = {
        "target": "",
        "output": Path("outputs/adapt"),
        "data": replace(cfg.data, source=""),
        "loop": replace(cfg.loop, stop_by="acceptance", eval_every=EVAL_EVERY),
    }
    if not isinstance(cfg, HeadConfig):
        return replace(cfg, draft=Standalone(checkpoint=str(old)), **shared)
    head = cfg.head
    if family.layers_key:
        head = replace(head, aux_layer_ids=tuple(family.read_layers(read_config(old))))
    return replace(
        cfg, start_from=old, head=head, draft_vocab_size=_count_vocabulary(old), **shared
    )


def _count_vocabulary(old: Path) -> int:
    """The size of a head's own vocabulary; 0 if it has the target's."""
    offsets = tensor_entries(old).get("d2t")
    return 0 if offsets is None else int(offsets["shape"][0])


def main(family: Family, old: Path, cfg: Any) -> None:
    """Adapt the draft `old`.

    Raises the same errors as `adapt`, and ValueError if there is no target, or if there are no data
    and `old` does not name its own data.
    """
    from redraft.distill.run.adaptation import adapt  # imported here, because they import torch
    from redraft.distill.run.training_run import refuse

    if not cfg.target:
        raise ValueError(
            f"the new version of the target is missing: redraft adapt {old} --target TARGET"
        )
    if not cfg.data.source:
        refuse(family, cfg)  # before hours of answers
        cfg = replace(cfg, data=replace(cfg.data, source=str(_answer(old, cfg))))
    adapt(family, cfg, old)


def _answer(old: Path, cfg: Any) -> Path:
    """Have the new target answer the questions that `old` was trained on.

    After a kill, the answers that exist are kept.
    """
    from redraft.files.kept import hash_key
    from redraft.recipes.data import regenerate
    from redraft.recipes.data.regenerate_config import RegenerateConfig

    asked = read_provenance(old).config.data
    if not asked.source:
        raise ValueError(
            f"{old} does not contain the name of its training data: set --data.source, ideally to answers of "
            f"{cfg.target}"
        )
    asking = RegenerateConfig(
        prompts=asked.source, split=asked.split, target=cfg.target, output=cfg.output
    )
    # The folder's name contains the target and the questions, so that answers of different
    # fine-tunes do not mix.
    who = hash_key([regenerate.identify(asking), asked.source, asked.split])[:8]
    asking = replace(asking, output=cfg.output.with_name(f"{cfg.output.name}-answers-{who}.jsonl"))
    print(f"{cfg.target} answers the questions of {asked.source}")
    regenerate.main(asking)
    return asking.output
