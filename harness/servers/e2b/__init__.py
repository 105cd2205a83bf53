"""A server with the interface of E2B, whose sandboxes are cells of this host (extra `e2b`)."""
