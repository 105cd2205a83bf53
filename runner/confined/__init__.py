"""Confined processes beside the launchers: they branch cells, or lead cells to hosts."""
