"""Divergences between target and draft.

Definitions, gradients in closed form, and the fused loss of training.
"""
