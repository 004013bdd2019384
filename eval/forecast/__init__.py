"""Expected acceptance, computed from target and draft without an engine."""
