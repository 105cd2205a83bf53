"""Typed stubs of tools, in Python and in TypeScript, for programs in cells and their authors."""
