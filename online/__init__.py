"""The learner beside a vLLM fleet: capture, buffer, gate, registry, rollout."""
