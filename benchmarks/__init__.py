"""Measurements of redraft itself: benchmarks against other trainers, the soak test, and studies.

They are not part of the package.
"""
