"""Acceptance over minutes of training, compared with other trainers."""
