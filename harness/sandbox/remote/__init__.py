"""The client of a daemon, and the frames that both exchange."""
