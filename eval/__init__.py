"""The only definitions of acceptance, and what is measured with them: forecast, engine, report."""
