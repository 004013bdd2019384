"""vLLM's draft compared number by number with training's."""
