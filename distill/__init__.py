"""Draft training: divergences, data, target signals, the step and its checkpoints."""
