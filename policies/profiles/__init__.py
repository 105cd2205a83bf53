"""The policies that ship with cellwright, as TOML with the reason beside every entry."""
