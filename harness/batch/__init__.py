"""Batches: the programs of a file, run or judged, with results that survive a kill."""
