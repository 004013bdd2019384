"""Commands to operate a fleet."""
