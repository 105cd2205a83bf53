"""Programs other than a call's: commands in the background, terminals, and programs with their own
pipes."""
