"""Data sets read, tokenised, labelled and packed into batches."""
