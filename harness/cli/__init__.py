"""The command `cellwright`: what it reads, what it prints, and what it asks a person."""
