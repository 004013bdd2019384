"""What the recipes' tests train on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from redraft.distill.data.corpus import stdlib_conversations


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 short conversations of two domains."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    chosen: dict[str, list[dict[str, object]]] = {"code": [], "prose": []}
    for conversation in stdlib_conversations():
        if len(chosen[str(conversation["domain"])]) < 30:
            chosen[str(conversation["domain"])].append(conversation)
    path.write_text("".join(json.dumps(row) + "\n" for rows in chosen.values() for row in rows))
    return path
