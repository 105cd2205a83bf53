"""Cellwright as an MCP server.  The SDK takes most of a second to import: nothing else imports this."""
