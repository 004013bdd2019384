"""Commands that measure drafts and recommend one."""
