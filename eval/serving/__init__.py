"""The serving benchmark, and the advice on how many tokens to draft."""
