"""A launcher: the start of its process, its configuration, and the generation of cells that it
forks."""
