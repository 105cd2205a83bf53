"""The answers of the supervisor to system calls of guests that the filter passes to it."""
