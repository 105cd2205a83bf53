"""The system calls that confine a cell of a policy on this host, in words."""

from itertools import groupby

from ..policies.errors import LaunchError
from ..policies.policy import Policy
from . import channel
from .generation import Generation
from .messages import Listed, decode
from .spawn import Spawned, interpreter

_MOST_BYTES = 4 * 1024 * 1024


def list_system_calls(policy: Policy) -> dict[str, list[str]]:
    """Return what a guest's process executes before its program, by layer and in order.

    Raises PolicyError, Unenforceable if this host lacks a layer, LaunchError.
    """
    spawned = Spawned(interpreter(), "cellwright.runner.launcher.listing")
    generation = Generation(policy, spawned, None)
    try:
        frame = channel.Receiver(generation.launcher.socket, _MOST_BYTES).receive_whole()
        if not frame:
            raise LaunchError("the launcher ended before it told its system calls")
        listed: Listed = decode(frame, Listed)
    finally:
        generation.close()
    by_layer = groupby(listed.steps, key=lambda step: step[0])
    return {layer: _counted([words for _, words in steps]) for layer, steps in by_layer}


def _counted(words: list[str]) -> list[str]:
    """Return each line once for all that follow one another."""
    runs = ((line, len(list(same))) for line, same in groupby(words))
    return [f"{line} ({count} times)" if count > 1 else line for line, count in runs]
