"""The names that other sandboxes use, each translated into a policy or a call of `Sandbox`."""
