"""Make `redraft COMMAND --help` quick to appear and pleasant to read."""
