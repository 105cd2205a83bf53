"""Parts that adapters share: a session as a sandbox of files, commands and functions of the host."""
