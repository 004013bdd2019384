"""Checks of a draft's folder without an engine.

Checks for one family are in a module with the family's name.
"""
