"""Check everything that only a GPU runs, in fifteen minutes on one card."""
