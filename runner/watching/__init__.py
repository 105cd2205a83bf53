"""Supervision of a cell while it runs a program: streams, calls, refusals, deadlines."""
