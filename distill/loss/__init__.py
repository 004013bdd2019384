"""Divergences between target and draft: definitions, gradients in closed form, and the fused loss of training."""
