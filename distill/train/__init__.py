"""The training step, the loop, its ranks and the folder of a run."""
