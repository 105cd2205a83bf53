"""The Model Context Protocol.  Modules here import the SDK, in half a second; others must not."""
