"""Every exception of cellwright; `cellwright.policies.errors` draws their tree."""

from .policies import errors as _errors
from .policies.errors import *  # noqa: F403 - all of its classes

__all__ = _errors.__all__
