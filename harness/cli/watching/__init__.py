"""Commands that show what runs, as it changes."""
