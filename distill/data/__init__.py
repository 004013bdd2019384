"""Read data sets, tokenise and label them, and pack them into batches."""
