"""The cost of a training, counted without a GPU."""
