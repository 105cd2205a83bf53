"""The audit trail, under the name that its users know."""

from .runner.audit.level import AuditLevel
from .runner.audit.log import AuditLog
from .runner.audit.record import AuditEntry
from .runner.audit.verification import verify

__all__ = ["AuditEntry", "AuditLevel", "AuditLog", "verify"]
