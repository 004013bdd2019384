"""Commands that measure drafts and say which to use."""
