"""A branching process that stops itself before a step, for tests that kill what it works on then."""

import importlib
import os
import signal
from typing import Any

_PACKAGE = "cellwright.runner.branching"


def module_that_stops(module: str, step: str) -> str:
    """Return what the supervisor starts in place of the branching process: the text becomes
    `from {} import main` in its command."""
    return f"{__name__} import stop_before;stop_before({module!r},{step!r});from {_PACKAGE}.main"


def stop_before(module: str, step: str) -> None:
    """Have this process stop when it first takes a step: a function, or a method of a class."""
    place: Any = importlib.import_module(f"{_PACKAGE}.{module}")
    *owners, name = step.split(".")
    for owner in owners:
        place = getattr(place, owner)
    taken, stopped = getattr(place, name), []

    def stop(*given: Any, **named: Any) -> Any:
        if not stopped:
            stopped.append(step)
            os.kill(os.getpid(), signal.SIGSTOP)
        return taken(*given, **named)

    setattr(place, name, stop)
