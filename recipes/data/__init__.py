"""Commands that prepare what drafts are trained on."""
