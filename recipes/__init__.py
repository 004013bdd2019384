"""Runnable files, one per job, and the `redraft` command."""
