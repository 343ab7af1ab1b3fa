"""Lowerings of a site, one op a file. Each builds a Rewrite or says why not."""
