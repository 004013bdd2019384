"""Draft families: one file for each trainable draft, and the engines' checkpoint layouts."""
