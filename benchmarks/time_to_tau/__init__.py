"""Acceptance over minutes of training, beside other trainers."""
