"""Cells that live across requests: their turns and clocks, how they freeze, branch and pause."""
