"""Code that runs inside vLLM's processes: it captures traffic and swaps drafts."""
