"""One request in a ready cell: its data, its execution, and its result."""
