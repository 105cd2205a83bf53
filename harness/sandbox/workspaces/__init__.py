"""Named workspaces: files that are kept from one cell to another."""
