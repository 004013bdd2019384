"""Model folders: publish them atomically, and read their tensors, configs and tokenizers."""
