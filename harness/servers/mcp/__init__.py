"""Cellwright as an MCP server.  Imported only where it runs: the SDK takes most of a second to
import."""
