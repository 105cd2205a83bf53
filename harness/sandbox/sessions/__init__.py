"""Sessions: one cell for several calls, which can be forked, branched, paused and kept as a skill."""
