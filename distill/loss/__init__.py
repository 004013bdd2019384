"""Divergences between target and draft.

The modules contain their definitions, their gradients in closed form, and the fused training loss.
"""
