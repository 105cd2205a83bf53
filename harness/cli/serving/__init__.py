"""Commands that start servers and daemons, and that inspect and end running ones."""
