"""The operators' side of a server: whether it is well, its numbers, and a record of each request."""
