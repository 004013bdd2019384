"""Demos on the small target."""
