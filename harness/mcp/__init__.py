"""The Model Context Protocol: servers of others whose tools we call, and the server that we are."""
