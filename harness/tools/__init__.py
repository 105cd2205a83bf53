"""Tools: what can be called by name with typed arguments, where they are kept, and who makes them."""
