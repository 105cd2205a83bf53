"""Network rules: names, addresses, paths, and the decision about a connection.  Pure."""
