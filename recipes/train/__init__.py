"""Commands that train drafts and prepare their data. `../distill_llama3b.py` is the first of them."""
