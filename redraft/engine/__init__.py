"""A real vLLM server: command, start, measurement and counters."""
