"""Turns records into a candidate draft, and judges it."""
