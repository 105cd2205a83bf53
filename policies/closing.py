"""What is closed once it is not needed any more: with `with`, or by hand."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something that a `with` statement closes at its end, however that comes."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
