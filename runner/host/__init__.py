"""What this host has for cells: its kernel, interpreters and libraries; and the plans made for it."""
