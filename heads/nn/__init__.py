"""Layers for several families."""
