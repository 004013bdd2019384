"""A soak: the whole online service under traffic and random faults, and a judge at its end."""
