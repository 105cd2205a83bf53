"""Durable runs: programs that pause for approval on disk and are replayed when they are resumed."""
