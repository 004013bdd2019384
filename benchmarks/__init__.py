"""Measurements of redraft itself: benchmarks against other trainers, the soak, and studies.

Not a part of the package.
"""
