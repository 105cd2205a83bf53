"""A server that judges: its own interface, and those of SandboxFusion, Piston and Judge0."""
