"""The host's resources for cells: kernel features, interpreters, libraries; and the plans for it."""
