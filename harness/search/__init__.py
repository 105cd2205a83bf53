"""Finding tools by words and by meaning."""
