"""The command `cellwright`: one module for each command, and modules that they share."""
