"""The audit trail: what was asked of sandboxes, what came of it, and what was refused."""
