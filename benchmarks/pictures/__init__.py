"""The pictures of README and docs: every one is made by `make pictures`, from committed data."""
