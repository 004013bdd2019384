"""Data and targets of the presets, and the traffic that a plan assumes."""
