"""The learner's live page and metrics."""
