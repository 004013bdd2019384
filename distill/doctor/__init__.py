"""The check that serving sees what training saw."""
