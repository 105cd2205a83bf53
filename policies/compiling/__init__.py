"""The compiler: a policy and the capabilities of a host become a plan, its filter and its variables."""
