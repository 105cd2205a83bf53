"""What agents and people use: the sandbox, the command line."""
