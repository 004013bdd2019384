"""A training run of a draft: refuse, open, start, forecast, train, publish, prove."""
