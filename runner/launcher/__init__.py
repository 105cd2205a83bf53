"""The process that cells are forked from: from the host to a root of its own, and then only forks."""
