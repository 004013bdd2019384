"""The definitions of acceptance, and the measurements built on them: forecast, engine, serving, parity, report."""
