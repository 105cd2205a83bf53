"""The audit trail: requests to sandboxes, their outcomes, and refused attempts."""
