"""Commands that prepare training data for drafts."""
