"""A tool's declaration: its name, its spec, and the JSON Schema of its arguments and result."""
