"""Copying a session's memory into other cells: the process that does it, confined."""
