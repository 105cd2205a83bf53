"""Servers: the daemon and the MCP server."""
