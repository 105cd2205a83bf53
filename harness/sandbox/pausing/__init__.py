"""Paused sessions: kept on disk without a cell, and resumed in a fresh one."""
