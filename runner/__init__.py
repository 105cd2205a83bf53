"""Cells and those who make and watch them: launcher, cell, supervisor."""
