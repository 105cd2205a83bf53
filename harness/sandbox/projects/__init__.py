"""Projects: a command works on a directory of the user, and on nothing else of the host."""
