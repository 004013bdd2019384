"""Speed and memory of training, compared with other trainers."""
