"""The interface for agents and people: sandboxes, tools, servers and the command line."""
