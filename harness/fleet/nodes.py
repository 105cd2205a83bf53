"""`FleetNode`: the protocol of a node, which an engine such as Ray implements."""

from typing import Protocol


class NodeGone(Exception):  # noqa: N818 - what happened
    """The node has ended, or does not answer: the message says why.  What it was sent may have run."""


class NodeAway(Exception):  # noqa: N818
    """The node could not be reached for a moment: the same call, with its key, can be sent again."""


class FleetNode(Protocol):
    """A `CellNode` somewhere else."""

    @property
    def name(self) -> str: ...

    def ask(self, data: bytes, timeout: float) -> bytes:
        """Send a message and return the answer to it; `timeout` in seconds.

        Raises NodeGone or NodeAway.
        """

    def close(self) -> None:
        """End the cells of the node, and the node itself."""
