"""Files that other servers and clusters deploy a bundle from."""
