"""Adapters for evaluation and training: environments of Harbor, verifiers and SWE-ReX, and rewards."""
