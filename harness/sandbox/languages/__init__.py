"""Languages of the table: compiled once in a cell of their own, kept, and run in cells."""
