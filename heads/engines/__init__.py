"""Engines that serve a draft: what each one reads from a draft's folder, and how to write it."""
