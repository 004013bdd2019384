"""Model folders: publish them atomically, read tensors, configs and tokenizers."""
