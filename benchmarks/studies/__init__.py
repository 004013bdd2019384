"""Studies: families of heads, training settings, and the small target itself."""
