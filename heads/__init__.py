"""Draft families: one file for every trainable draft, and the checkpoint layouts of the engines."""
