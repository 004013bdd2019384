"""The training step and loop, and the ranks and folder of a run."""
