"""Draft families: every trainable draft, one file each, and the checkpoint layouts that engines read."""
