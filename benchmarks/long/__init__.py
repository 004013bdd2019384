"""Training on rows of 32k and 128k tokens: memory, speed, and ranks that share a row."""
