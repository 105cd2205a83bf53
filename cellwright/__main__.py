"""`python -m cellwright`."""

from .harness.cli.main import command

command()
