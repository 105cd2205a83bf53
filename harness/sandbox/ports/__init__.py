"""Ports of cells that the host can reach."""
