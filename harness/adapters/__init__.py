"""Adapters: the interfaces of agent frameworks to code execution, over one session of a sandbox.

One module for each framework, which only that framework's users import; all share `session`.
"""
