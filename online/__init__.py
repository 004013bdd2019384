"""The learner next to a vLLM fleet: capture, buffer, gate, registry, rollout."""
