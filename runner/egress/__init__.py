"""The egress process of a sandbox: the only way out of its cells, for names that the policy allows."""
