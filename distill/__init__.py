"""Draft training: divergences, data, target signals, training steps and checkpoints."""
