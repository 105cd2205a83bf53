"""Thin functions over Linux system calls: the only place in cellwright that makes them beside
Python's own.

Each function is named after the call it makes, raises OSError naming that call, and knows nothing
of cells or policies.  Everything here may run in a process that was just forked.
"""
