"""The daemon: a sandbox for each policy behind a Unix socket, and the client that talks to it."""
