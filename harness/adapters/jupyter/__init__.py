"""A Jupyter kernel and an IPython magic, whose programs run in a cell."""
