"""The policies that ship with cellwright, as TOML with reasons, and the loader of all policies."""
