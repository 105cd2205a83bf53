"""Examples: small programs that use `cellwright` as its users do; README.md runs them."""
