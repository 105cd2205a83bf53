"""What a tool declares: its name, its spec, and the JSON Schema of its arguments and result."""
