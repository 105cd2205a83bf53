"""How much a record matters.  Apart, because a configuration names it and nothing else of this."""

import enum


class AuditLevel(enum.IntEnum):
    """How much a record matters."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50
