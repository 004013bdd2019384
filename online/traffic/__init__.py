"""The tap: a recording proxy in front of a vLLM server without the plugin."""
