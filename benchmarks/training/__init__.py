"""Speed and memory of training against other trainers."""
