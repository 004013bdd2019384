"""Number-by-number comparison of vLLM's draft with training's."""
