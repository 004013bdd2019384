"""The cost of a training step on GPUs, counted at real sizes without a GPU and without weights."""
