"""A real vLLM server: its command, start-up, measurement and counters."""
