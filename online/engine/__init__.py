"""The code that runs inside vLLM's processes: capture of traffic and swaps of the draft."""
