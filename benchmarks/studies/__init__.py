"""Studies on the small target: all families of heads, a draft per domain, and the target itself."""
