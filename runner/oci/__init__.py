"""Launchers inside containers, which an OCI runtime makes from its command line."""
