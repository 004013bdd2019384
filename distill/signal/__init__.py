"""The target's distributions and hidden states: computed here, cached on disk, or read from servers."""
