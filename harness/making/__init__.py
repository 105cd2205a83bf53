"""ToolFactory: tools drafted from source, tested, kept and called in cells."""
