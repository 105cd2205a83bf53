"""The audit trail, under the name that its users know."""

from .runner.audit.log import AuditLog
from .runner.audit.record import AuditEntry
from .runner.audit.verification import verify
from .runner.settings import AuditLevel

__all__ = ["AuditEntry", "AuditLevel", "AuditLog", "verify"]
