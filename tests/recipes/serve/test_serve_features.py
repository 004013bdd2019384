from __future__ import annotations

from pathlib import Path

import pytest

from redraft.recipes.serve.serve_features import Config, main


def test_layers_that_the_target_does_not_have_are_refused_before_a_server_starts(random_target: Path) -> None:
    with pytest.raises(ValueError, match=r"auxiliary layers \[3\] of a target that has 2 layers"):
        main(Config(target=str(random_target), layers=(1, 3)))
