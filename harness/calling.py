"""On whose behalf a thread works while it carries out a call of a tool.

What such a call executes in turn belongs to it: in the trail, in depth, and in what it may call.
"""

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tools.spec import Caller

CALLING: "contextvars.ContextVar[Caller | None]" = contextvars.ContextVar("calling", default=None)
