"""What a terminal, a model or a log may be shown."""
