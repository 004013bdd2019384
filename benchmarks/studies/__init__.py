"""Studies on the small target: all families of heads, and the target itself."""
