"""`LauncherClaim`: keeps the launcher of a cell that is gone for a while, for another one like it."""

import threading

from .held_cell import HeldCell, Origin


class LauncherClaim:
    """Safe from many threads; the launcher ends with its last cell and its last claim, if it was
    replaced."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        origin.keep()
        self._lock = threading.Lock()
        self._is_released = False

    @property
    def launcher_id(self) -> str:
        return self._origin.id

    def is_alive(self) -> bool:
        """Tell whether the launcher is there."""
        return self._origin.is_alive()

    def make(self) -> HeldCell:
        """Return a new cell of the launcher; raises LaunchError, LauncherLost."""
        return self._origin.make_kept()

    def release(self) -> None:
        """Let the launcher go; a second call does nothing."""
        with self._lock:
            is_first, self._is_released = not self._is_released, True
        if is_first:
            self._origin.free(None)
