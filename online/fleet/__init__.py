"""The servers: find them, watch them, publish versions and roll them out."""
