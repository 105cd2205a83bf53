"""The daemon: a sandbox for each of its policies behind a Unix socket."""
