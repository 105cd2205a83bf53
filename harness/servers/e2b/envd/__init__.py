"""The cell's part of an E2B sandbox: a server for its commands and files, with envd's interface.

The texts of these modules run as a program of the cell (e2b_cell.py), so they import nothing of
cellwright. They have the rights of any program there, and the host relays their answers without
decoding them.
"""
