"""Benchmarks of `cellwright bench`: the cost of cells on this machine.  Nothing else imports them."""
