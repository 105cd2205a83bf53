"""Judging: a program and its cases come to a verdict that does not depend on load."""
