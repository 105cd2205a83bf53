"""Text for terminals, models and logs: hidden characters, secrets, presentation."""
