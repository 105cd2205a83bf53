"""Sandboxes whose launcher runs in a container that an OCI runtime makes."""
