"""The way from cells to hosts by name, and its change while cells run."""
