"""One call: its arguments are checked, its program runs in a cell, and the trail records both."""
