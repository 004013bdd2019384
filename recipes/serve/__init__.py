"""Commands that serve a target and learn from its traffic."""
