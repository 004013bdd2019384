"""The target's distributions and hidden states.

Computed here, cached on disk, or read from servers.
"""
