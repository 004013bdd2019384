"""Acceptance over minutes of training, in comparison with other trainers."""
