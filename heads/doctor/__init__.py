"""Checks of a draft's folder without an engine.

Checks that apply to one family are in a module with the family's name.
"""
