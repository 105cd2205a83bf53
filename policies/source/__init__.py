"""Source checks: an early, friendly refusal.  Advice, never the boundary: the kernel is that."""
