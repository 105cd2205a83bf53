"""Tools: functions that programs call by name with typed arguments, their registry and their broker."""
