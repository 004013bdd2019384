"""Check the windows of a head's layers: the engine must use the same windows as training."""

from collections.abc import Iterator, Mapping
from typing import Any

from redraft.files.folder import trained_with
from redraft.files.windows import served_views, target_window, trained_views
from redraft.heads.doctor.pair import Finding, Pair

NEAR = "with a smaller window than in training, a head loses keys that it learned to use"


def view_findings(config: Mapping[str, Any], family: str) -> Iterator[Finding]:
    """Check that vLLM reads the windows and directions used in training, and no larger windows."""
    try:
        trained, served = trained_views(config), served_views(config)
    except ValueError as error:
        yield Finding.of(str(error).removeprefix("the draft: "))
        return
    if served != trained:
        layer = next(i for i, view in enumerate(served) if view != trained[i])
        yield Finding(
            f"layer {layer} was trained with {trained[layer]}, but vLLM reads {served[layer]} in "
            "this layout",
            _cure_direction(family, trained_causal={view.is_causal for view in trained}),
        )
    recorded = trained_with(config)
    own, now = recorded.get("window", 0), trained[0].window
    now = next((view.window for view in trained if view.window), now)
    full = [layer for layer, view in enumerate(trained) if view.window is None]
    if own and (now is None or now > own):
        yield Finding(
            f"the layers attend to {now or 'all'} positions, but the head was trained with a window of "
            f"{own}",
            f'write "sliding_window": {own} and the layer_types used in training',
        )
    elif own and full != recorded.get("full_layers", full):
        yield Finding(
            f"the layers that attend to all positions are {full or 'none'}, but in training they were "
            f"{recorded['full_layers'] or 'none'}",
            "write the layer_types used in training",
        )
    elif now is not None and own != 0 and (own is None or now < own):
        yield Finding(
            f"the layers attend to {now} positions, but the head was trained with {own or 'all'}: {NEAR}",
            "compare both with `redraft eval`, or train with --head.window",
            is_doubt=True,
        )


def windows(pair: Pair) -> Iterator[Finding]:
    """Report `view_findings`, and any window that the target imposes on full-attention layers."""
    found = list(view_findings(pair.config, pair.family.name))
    yield from found
    reach = target_window(pair.target_config)
    if any(not finding.is_doubt for finding in found) or reach is None:
        return
    if None in {view.window for view in served_views(pair.config)}:
        yield Finding(
            f"vLLM gives layers without a window the target's window of {reach} "
            "positions, because all of the target's layers have one",
            f"train with --head.window {reach}: the forecast uses that window in any case",
            is_doubt=True,
        )


def _cure_direction(family: str, trained_causal: set[bool]) -> str:
    if family == "dspark":
        return f'write "is_causal": {str(trained_causal == {True}).lower()} into transformer_layer_config'
    if trained_causal == {False}:
        return 'write "sliding_window_non_causal": true into config.json'
    return "export the head in the layout vllm, which records the direction of each layer"
