"""One training of a draft: refuse, open, start, forecast, train, publish, prove."""
