"""The training step, the loop, the ranks and the folder of a run."""
