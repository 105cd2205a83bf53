"""`Closing`: the base class of objects that are closed by `with` or by `close()`."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that calls `close()` at the end, also after an exception."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
