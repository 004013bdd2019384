"""Soak test: the whole online service under traffic and random faults, judged at the end."""
