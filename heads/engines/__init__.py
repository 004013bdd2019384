"""Engines that serve a draft: what each one reads of a draft's folder, and how to write it so."""
