"""The tap: a recording proxy in front of a vLLM without the plugin."""
