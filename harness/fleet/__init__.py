"""Cells of many hosts: a router that is independent of the engine, and nodes that run on Ray."""
