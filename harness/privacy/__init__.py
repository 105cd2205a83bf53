"""Personal data: found in texts, replaced by tokens, and restored where a policy allows it."""
