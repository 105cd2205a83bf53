"""Durable runs: programs that pause for a person and are replayed afterwards."""
