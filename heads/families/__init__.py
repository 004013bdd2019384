"""The draft families, one file each."""
