"""Proxies in front of vLLM: the router and the tap."""
