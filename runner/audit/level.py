"""`AuditLevel`: a module of its own, because a configuration imports nothing else of the trail."""

import enum


class AuditLevel(enum.IntEnum):
    """The importance of a record."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50
