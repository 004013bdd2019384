"""Draft models for speculative decoding: distilled, proven, and trained on live traffic."""
