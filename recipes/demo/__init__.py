"""Data and targets for the presets."""
