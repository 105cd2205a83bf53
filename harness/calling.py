"""On whose behalf a thread works while it carries out a call of a tool.

What such a call executes in turn belongs to it: in the trail, in depth, and in what it may call.
"""

import contextvars
from typing import TYPE_CHECKING

from ..runner.performance import NEVER

if TYPE_CHECKING:
    from .tools.spec import Caller

CALLING: "contextvars.ContextVar[Caller | None]" = contextvars.ContextVar("calling", default=None)

# A descriptor that is readable once whoever waits for the call does not any more.
CANCEL: "contextvars.ContextVar[int]" = contextvars.ContextVar("cancel", default=NEVER)
