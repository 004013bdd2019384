"""Turns records into a candidate draft, and evaluates it."""
