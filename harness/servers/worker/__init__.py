"""The process that a sandbox starts as one of its workers."""
