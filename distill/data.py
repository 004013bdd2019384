"""Conversations in, training batches out."""

from __future__ import annotations

import hashlib
import json


def conversation_hash(messages: list[dict[str, str]]) -> str:
    """SHA-256 (hex) of the roles and contents, whatever else a row carries: the identity of a conversation."""
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_held_out(messages: list[dict[str, str]], fraction: float) -> bool:
    """True for `fraction` of all conversations: decided by their hash alone, so by every process alike, for ever."""
    return int(conversation_hash(messages)[:16], 16) < fraction * 2**64
