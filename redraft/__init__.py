"""Draft models for speculative decoding: distilled, proven, kept trained from live traffic."""
