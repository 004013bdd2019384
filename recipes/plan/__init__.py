"""Commands that calculate the cost of training and capture without a GPU."""
