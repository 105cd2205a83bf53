"""Cells, and the processes that make and watch them: launcher, cell, supervisor."""
