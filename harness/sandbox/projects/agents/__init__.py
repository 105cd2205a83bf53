"""Coding agents: the settings of their other sandboxes, which are obeyed, and hooks for them."""
