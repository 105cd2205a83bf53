"""`WorkerImageCells`: the cells of workers whose programs have an image as their root."""

from typing import TYPE_CHECKING

from ....policies.policy import Policy
from ..containers.image_cells import ImageCells
from ..sandbox_arguments import SandboxArguments
from .worker_cells import WorkerCells

if TYPE_CHECKING:
    from ..pythons import HostPython


class WorkerImageCells(ImageCells, WorkerCells):
    """Places commands as an image asks for, and has workers execute them.

    The worker finds the Python of the image, by which a command becomes its user.
    """

    def _start(self, given: SandboxArguments, own: Policy, python: "HostPython | None") -> None:
        super()._start(given, own, python)
        self.python = self._workers.all()[0].python
