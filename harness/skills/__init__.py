"""Skills: folders of instructions and files for agents, read, checked, trusted and kept."""
