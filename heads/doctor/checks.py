"""All checks of a draft's folder.

Some apply to every family, and others come from the family's row in the catalog.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from redraft.files.artifact import MANIFEST, PROVENANCE, verify
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import model_folder
from redraft.files.served_target import visible_length
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import UnknownTensorsError, list_tensors, read_tensors
from redraft.heads.doctor import dflash, eagle3
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.families.mtp_layouts import detect_layout
from redraft.heads.target import Target

OF_VLLM: tuple[Check, ...] = (
    eagle3.nested_ids,
    eagle3.map_of_all,
    dflash.architecture,
    dflash.causality,
)
"""Checks of settings and tensors that only vLLM reads."""


def static_findings(
    pair: Pair, *, method: str | None, num_speculative_tokens: int, engine: str = "vllm"
) -> list[Finding]:
    """Report the problems visible in configs and tensors, without running the draft.

    For an engine other than vLLM (`heads.engines`), the checks in `OF_VLLM` are skipped.
    """
    own = pair.family.own_checks()
    # `first_cure` shows the first problem, so causes come before their consequences.
    checks: list[Check] = [
        manifest,
        target_fingerprint,
        partial(method_flag, method=method),
        *(check for check in own if engine == "vllm" or check not in OF_VLLM),
        numbers,
        partial(number_of_tokens, num_speculative_tokens=num_speculative_tokens),
    ]
    found = [finding for check in checks for finding in check(pair)]
    # A wrong key or tensor also breaks loading, but the checks above describe it better.
    known = any(not finding.is_doubt for finding in found)
    return found if known else [*completeness(pair, engine), *found]


def first_cure(target: str | Path, draft: str | Path, num_speculative_tokens: int) -> str:
    """Return a draft's first problem with its fix; empty if there is none."""
    try:
        pair = Pair.read(TargetFolder.open(target), model_folder(draft))
        found = static_findings(pair, method=None, num_speculative_tokens=num_speculative_tokens)
    except (ValueError, OSError) as error:  # the folder cannot be read
        return f"; {error}"
    problems = [finding for finding in found if not finding.is_doubt]
    return "".join(f"; {finding.problem}, cure: {finding.cure}" for finding in problems[:1])


def notes(pair: Pair) -> Iterator[str]:
    if not (pair.draft / MANIFEST).is_file():
        yield f"{pair.draft} has no {MANIFEST}, so its files cannot be checked for damage"
    if not (pair.draft / PROVENANCE).is_file():
        yield (
            f"{pair.draft} has no {PROVENANCE}, so the target and the acceptance of its "
            "training are unknown"
        )
    if not pair.trained_with and pair.family.layers_key:
        yield (
            "its config does not record how it was trained: aux layers and norms are "
            "assumed to be as config.json states"
        )
    trained_length = pair.provenance.config.loop.sequence_length
    served_length = visible_length(pair.target_config, is_head=pair.family.is_head)
    if trained_length is not None and trained_length < served_length:
        yield (
            f"trained on {trained_length} positions, but the target serves {served_length}: measure "
            "acceptance in long texts"
        )


def manifest(pair: Pair) -> Iterator[Finding]:
    """Check that every file is unchanged since it was published.

    A folder without a manifest was not published, and passes.
    """
    if not (pair.draft / MANIFEST).is_file():
        return
    try:
        verify(pair.draft)
    except ValueError as error:
        yield Finding.of(error)


def target_fingerprint(pair: Pair) -> Iterator[Finding]:
    """Check that the provenance names the given target. A different version of it is a doubt."""
    trained_for = pair.provenance.target_fingerprint
    # A folder that contains the layer differs from the target that the layer was trained for.
    if pair.is_own_target or trained_for in ("", pair.target.fingerprint):
        return
    other, cure = "another target", "give that target, or train a draft for this one"
    is_doubt = pair.provenance.names_lineage(pair.target.lineage)
    if is_doubt:
        other = "a different version of this target"
        cure = "measure the acceptance with `redraft eval`, or run `redraft adapt`"
    name = pair.provenance.target or "another model"
    found = f"the draft was trained for {other}: {name}, fingerprint {trained_for[:12]}"
    yield Finding(found, cure, is_doubt)


def completeness(pair: Pair, engine: str = "vllm") -> Iterator[Finding]:
    """Check that the checkpoint has exactly the tensors of the head.

    Engines load an incomplete checkpoint without an error.
    """
    try:
        if pair.family.is_head:
            pair.family.load(pair.draft, lambda: Target.from_folder(pair.target.folder))
        else:
            load_causal_lm(pair.draft)
    except UnknownTensorsError as error:
        yield _describe_extra(pair, error.names, engine)
    except (ValueError, KeyError) as error:
        text = f"config.json lacks {error}" if isinstance(error, KeyError) else str(error)
        yield Finding(
            text.removeprefix(f"{pair.draft} ").removeprefix(f"{pair.draft}: "),
            "export the head again",
        )


EXTRA = {
    r"\.bias$": "a bias that its layer does not have",
    r"\b(input_norm|fc_norm)\.": "a norm that config.json does not switch on",
    r"\bmask_hidden$": "the feature of P-EAGLE's masks",
    r"\b(markov_head|confidence_head)\.": "a part of a DSpark head",
    r"\b(embed_tokens|lm_head)\.": "a copy of a matrix that the head shares with the target",
    r"(^|\.)(layers\.\d+|midlayer)\.": "a part of a layer that the family's layers do not have",
}
"""Descriptions of tensors that do not belong to the head, by a pattern in their name."""


def _describe_extra(pair: Pair, names: list[str], engine: str) -> Finding:
    """Describe the purpose of an unknown tensor, and how the engine treats it."""
    name = names[0]
    known = (meaning for pattern, meaning in EXTRA.items() if re.search(pattern, name))
    meaning = next(known, f"not a tensor of this family ({pair.family.title})")
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    # vLLM's AutoWeightsLoader ignores biases, and its Medusa loader ignores every unknown name. The
    # other loaders fail.
    is_ignored = engine != "vllm" or name.endswith(".bias") or pair.family.name == "medusa"
    treatment = "the engine ignores it" if is_ignored else "vLLM fails to start with it"
    return Finding(
        f"the checkpoint contains {name}{others}, {meaning}: {treatment}",
        "remove it from the checkpoint if the head was trained without it; if not, no engine "
        "computes this head",
    )


# Dtypes of packed weights, whose values are meaningless without scales.
QUANTIZED = {"F8_E4M3", "F8_E5M2", "U8", "I8"}


def numbers(pair: Pair) -> Iterator[Finding]:
    """Check that every value is finite and that no matrix is all zeros.

    Zero biases and zero-centred norms are normal.
    """
    for name in draft_tensors(pair):
        # This matches F64, F32, F16 and BF16, but not BOOL (t2d), which also begins with B.
        if pair.dtypes[name] in QUANTIZED or not pair.dtypes[name].startswith(("F", "BF")):
            continue
        tensor = read_tensors(pair.draft, [name])[name]
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            yield Finding(
                f"{name} contains {wrong} values that are not finite (NaN or infinity), "
                "so the draft proposes nothing useful",
                "export the draft again in bfloat16: the largest float16 number is 65,504"
                if pair.dtypes[name] == "F16"
                else "export an earlier checkpoint: training diverged, or the file was damaged",
            )
        elif tensor.ndim > 1 and not bool(tensor.any()):
            yield Finding(
                f"{name} is all zeros: it was never trained, or was lost in a conversion",
                "export the draft again from its training run, or train it",
            )


def draft_tensors(pair: Pair) -> list[str]:
    """Return the draft's tensor names; in a folder with its target, only the draft's own."""
    if not (pair.is_own_target and pair.family.is_in_target):
        return list(pair.shapes)
    prefix = detect_layout(pair.target_config).prefix.format(n=pair.target_config.num_hidden_layers)
    return [name for name in pair.shapes if name.startswith(prefix)]


def copy_of_target(pair: Pair) -> Iterator[Finding]:
    """Check that a standalone draft is not a copy of its target."""
    files = {folder: list_tensors(folder) for folder in (pair.draft, pair.target.folder)}
    if files[pair.draft].keys() != files[pair.target.folder].keys():
        return
    # Compare layers first: in any other model, the first layer differs, and `all` reads no further.
    equal = (
        _is_same(pair, name)
        for name in sorted(files[pair.draft], key=lambda name: ".layers." not in name)
    )
    if all(equal):
        yield Finding(
            "the draft's tensors are all equal to the target's: every token is accepted, "
            "and nothing becomes faster",
            "give a smaller draft (--draft): `redraft train standalone` can make one from "
            "some layers of the target",
        )


def _is_same(pair: Pair, name: str) -> bool:
    mine, its = (read_tensors(folder, [name])[name] for folder in (pair.draft, pair.target.folder))
    return mine.shape == its.shape and torch.equal(_narrow(mine), _narrow(its))


def _narrow(tensor: Tensor) -> Tensor:
    # A copy may be stored in a different dtype, so compare after rounding.
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


STEERING = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft's path from which vLLM infers the method, in the order in which it checks them
(`vllm.config.speculative`). vLLM skips this if the method is set to one of these.
"""


def method_flag(pair: Pair, method: str | None) -> Iterator[Finding]:
    """Check that the requested method, and the one that config and path imply, are the family's."""
    family, right = pair.family.name, pair.family.method
    if method not in (None, right):
        yield Finding(
            f'method "{method}" does not run {family} drafts',
            f'serve it with "method": "{right}"',
        )
    algorithm = pair.config.get("speculators_model_type")
    if algorithm not in (None, pair.family.algorithm):
        yield Finding(
            f'config.json has speculators_model_type "{algorithm}", but the tensors are those of '
            f"{family}",
            f'write "{pair.family.algorithm}" there and into speculators_config.algorithm',
        )
    named = (pair.config.get("redraft") or {}).get("family")
    if named not in (None, family):
        yield Finding(
            f"config.json names the family {named}, but the tensors are those of {family}",
            "export the head again: weights and config belong to different heads",
        )
    # vLLM searches the whole path, including parent folders. vLLM does not infer the method if one
    # of these four is set.
    path = str(pair.draft).lower()
    steered = next((method for part, method in STEERING.items() if part in path), right)
    if steered != right and right not in STEERING.values():
        yield Finding(
            f'the path {pair.draft} makes vLLM choose the method "{steered}", even if it is set to '
            f'"{right}"',
            f"move the draft to a path without {', '.join(STEERING)}",
        )


def number_of_tokens(pair: Pair, num_speculative_tokens: int) -> Iterator[Finding]:
    """Check that no more draft tokens are requested than the checkpoint can propose."""
    most = pair.family.max_tokens(pair.config)
    if most is not None and num_speculative_tokens > most:
        yield Finding(
            f"{num_speculative_tokens} tokens are requested, but the draft proposes only {most}; vLLM "
            "fills in the others with arbitrary tokens",
            f'serve with at most "num_speculative_tokens": {most}',
        )
