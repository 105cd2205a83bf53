"""Sandboxes and sessions: cells of this process, or of a daemon, behind one interface."""
