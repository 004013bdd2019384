"""Layers that several families use."""
