"""Commands that run programs: once, in a session, at a terminal, to learn a policy, or for a model."""
