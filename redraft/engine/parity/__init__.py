"""Compare vLLM's draft with training's, number by number."""
