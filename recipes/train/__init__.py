"""Commands that prepare data and models, and train drafts: one recipe for each family."""
