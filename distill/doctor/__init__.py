"""Check that serving gives a draft the same inputs as training."""
