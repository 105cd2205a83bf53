"""The kernel specification: the directory by which Jupyter finds the kernel and the command of it."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....policies.errors import PolicyError
from ....policies.extras import how_to_install


def install(
    name: str, display_name: str, command: Sequence[str], *, user: bool, prefix: str | None
) -> str:
    """Write the specification of a kernel and return its directory; raises PolicyError.

    `command` gets the path of the connection file as its last argument.  `user`: for this user only;
    `prefix`: below this directory; else for all users.
    """
    try:
        from jupyter_client.kernelspec import KernelSpecManager
    except ImportError as error:
        raise PolicyError(
            f"jupyter: {error.name} is not installed", how_to_install("jupyter")
        ) from None
    specification = {
        "argv": [*command, "{connection_file}"], "display_name": display_name, "language": "python",
        "interrupt_mode": "message", "metadata": {"debugger": False},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "kernel.json").write_text(json.dumps(specification, indent=1))
        try:
            return str(
                KernelSpecManager().install_kernel_spec(directory, name, user=user, prefix=prefix)
            )
        except ValueError as error:
            raise PolicyError(f"--name: {error}") from None
        except OSError as error:
            raise PolicyError(
                f"cannot write {error.filename}: {error.strerror}", "use --user or --prefix DIR"
            ) from None
