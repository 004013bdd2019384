from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from make_heads import make_target

from heads.families import MODULES, family, family_of
from heads.target import Target


@pytest.mark.parametrize("name", [name for name in MODULES if name != "mtp"])
def test_a_family_makes_exports_and_recognises_its_heads(name: str, tmp_path: Path) -> None:
    model = make_target(num_hidden_layers=7)
    chosen = family(name)
    head = chosen.head(chosen.config(), Target.of(model))
    assert isinstance(head, torch.nn.Module)
    assert head.is_autoregressive is False
    head.export(tmp_path)
    assert family_of(tmp_path) == name
    assert type(family(family_of(tmp_path)).head.load(tmp_path, Target.of(model))) is chosen.head


def test_a_head_of_others_is_recognised_by_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    assert family_of(tmp_path) == "eagle3"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match=r"no head of a known family \(architecture LlamaForCausalLM\)"):
        family_of(tmp_path)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no head family egale3: choose one of eagle1, eagle3"):
        family("egale3")
