from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from redraft.recipes.serve.serve_features import FeaturesConfig, main


def test_layers_that_the_target_does_not_have_are_refused_before_a_server_starts(
    random_target: Path,
) -> None:
    with pytest.raises(ValueError, match=r"\[3\].*2"):
        main(FeaturesConfig(target=str(random_target), layers=(1, 3)))


def test_a_target_whose_states_vllm_does_not_send_is_refused_with_the_cure(tmp_path: Path) -> None:
    AutoConfig.for_model("deepseek_v4", num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"deepseek_v4.*--signal\.kind") as refused:
        main(FeaturesConfig(target=str(tmp_path), layers=(1, 3)))
    assert "\n" not in str(refused.value)
