"""The target's distributions and hidden states.

They are computed here, cached on disk, or read from servers.
"""
