"""A bundle over files: read them, prepare them as the manifest declares, run, and tell answers."""
