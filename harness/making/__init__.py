"""Making tools at run time: source code is checked, tested, stored and called in cells."""
