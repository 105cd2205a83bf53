"""Supervisors in child processes of their own."""
