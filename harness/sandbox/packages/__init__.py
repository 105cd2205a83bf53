"""Packages for Python cells: locked, fetched on the host, opened in cells, kept in a store."""
