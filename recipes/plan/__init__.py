"""Commands that count the cost of training and capture without a GPU."""
