"""`CellEnvironment`: an environment of Harbor, a session of a sandbox for each trial.

With an image the cell has it as its root; without one, programs are those of the host.
"""

import functools
import posixpath
import threading
from pathlib import Path
from typing import Any

import msgspec

from ....policies.errors import PolicyError
from ....policies.network.rule import NetworkRule
from ....policies.policy import MIB, Policy
from ....policies.profiles.loading import load_policy
from ...sandbox.calls.background import in_thread
from ...sandbox.images.image import StoredImage
from ...sandbox.images.image_store import ImageStore
from ..common.cell_sandbox_session import AdapterSession, missing
from .transfers import LASTING, download, download_file, lasting, upload

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import (
        EnvironmentCapabilities,
        EnvironmentResourceCapabilities,
    )
    from harbor.environments.options import EnvironmentOptions
    from harbor.models.task.config import NetworkMode, NetworkPolicy
    from harbor.models.trial.config import ResourceMode
    from harbor.models.trial.paths import EnvironmentPaths
except ImportError as error:
    raise missing("harbor", "harbor", error) from error

# the one user of a cell without an image, by any of its names
_USERS = (None, "root", 0, "0", "cell", 1000, "1000")
_WORKING_DIR = "/workspace"
_BUILDING = threading.Lock()
_IMAGE_INODES = 1 << 18  # at least; packages have many small files


class CellOptions(EnvironmentOptions):
    """Options of `--environment-kwarg`.

    policy: a profile or a file
    image: in place of the task's: a name in the store, or the path of a layout, tar or directory
    build_policy: of the cells that build a Dockerfile, whose RUN has no network by default
    ports: those of the hosts that a task allows; no program of the cell can listen on them
    """

    policy: str = "workshop"
    image: str | None = None
    build_policy: str | None = None
    ports: list[int] = [80, 443]  # noqa: RUF012 - pydantic copies it


class CellEnvironment(BaseEnvironment):
    """A session in a cell.

    The image is that of the options or of the task.  Without one, programs are those of the host below
    /usr/bin; `/logs`, `/tests`, `/solution`, `/app` and the
    working directory of the task are directories of the cell's own; the files of `environment/` are
    copied to the working directory.
    """

    options_model = CellOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cell: AdapterSession | None = None
        self._image: StoredImage | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "cellwright"

    @property
    def capabilities(self) -> Any:
        return EnvironmentCapabilities(
            disable_internet=True, network_allowlist=True, network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True, dynamic_network_policy=True,
        )  # fmt: skip

    @classmethod
    def resource_capabilities(cls) -> Any:
        return EnvironmentResourceCapabilities(
            cpu_limit=True, memory_limit=True, fractional_cpus=True
        )

    @property
    def _image_name(self) -> str | None:
        name: str | None = self.options.image or self.task_env_config.docker_image
        return name

    def _validate_definition(self) -> None:
        folder = Path(self.environment_dir)
        if (folder / "docker-compose.yaml").exists():
            raise PolicyError(
                f"{self.environment_name}: the task needs several containers (docker-compose.yaml), "
                "and a cell is one",
                "use --env docker",
            )

    def _find_image(self, force_build: bool) -> StoredImage | None:
        """Return the image of the trial, built first if the task has a Dockerfile and no name."""
        has_file = (Path(self.environment_dir) / "Dockerfile").exists()
        name = self._image_name
        if name and (self.options.image or not (force_build and has_file)):
            return ImageStore().find(name)
        if not has_file:
            return None
        from ...sandbox.building.image_build import build_image  # many tasks name an image

        with _BUILDING:  # trials of one task wait for the first, and find its steps in the cache
            return build_image(
                self.environment_dir,
                policy=self.options.build_policy,
                on_progress=self.logger.debug,
            )

    @property
    def _workdir(self) -> str:
        beginning = (self._image.config.working_dir or "/") if self._image else _WORKING_DIR
        return posixpath.join(beginning, self.task_env_config.workdir or "")

    def _policy(self) -> Policy:
        """Return the policy of the trial: the chosen one with the task's limits, network and places."""
        chosen = load_policy(self.options.policy)
        limits = chosen.limits
        if cpus := self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT):
            limits = msgspec.structs.replace(limits, cpus=float(cpus))
        if memory := self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT):
            limits = msgspec.structs.replace(limits, memory_bytes=memory * MIB)
        if storage := self.task_env_config.storage_mb:  # files are in the memory of the cell
            most = min(storage * MIB, limits.memory_bytes)
            limits = msgspec.structs.replace(limits, workspace_bytes=most)
        # A cell listens on the ports of these rules only, so they are those of all phases.
        phases = (self.network_policy, *self._phase_network_policies)
        rules = dict.fromkeys(rule for each in phases for rule in self._rules(each))
        network = msgspec.structs.replace(chosen.network, allow=tuple(rules))
        chosen = msgspec.structs.replace(chosen, limits=limits, network=network)
        if self._image:
            inodes = max(limits.workspace_inodes, _IMAGE_INODES)
            limits = msgspec.structs.replace(limits, workspace_inodes=inodes)
            return lasting(msgspec.structs.replace(chosen, limits=limits))
        paths = EnvironmentPaths()
        places = (paths.logs_dir, paths.tests_dir, paths.solution_dir, "/app", "/installed-agent")
        return lasting(chosen, *map(str, places), self._workdir, *self._mount_targets())

    def _rules(self, asked: NetworkPolicy) -> tuple[NetworkRule, ...]:
        ports = tuple(self.options.ports)
        if asked.network_mode == NetworkMode.PUBLIC:
            return (NetworkRule(host="*", any=True, ports=ports, schemes=("tcp",)),)
        hosts = asked.allowed_hosts if asked.network_mode == NetworkMode.ALLOWLIST else ()
        return tuple(NetworkRule(host=host, any=True, ports=ports) for host in hosts)

    async def _apply_network_policy(self, network_policy: NetworkPolicy) -> None:
        rules = self._rules(network_policy)
        if rules or self.cell.sandbox.policy.network.allow:
            await in_thread(lambda: self.cell.sandbox.network.replace(rules))

    @property
    def cell(self) -> AdapterSession:
        """The session; raises RuntimeError before `start` and after `stop`."""
        if self._cell is None:
            raise RuntimeError("the environment was not started")
        return self._cell

    async def start(self, force_build: bool) -> None:
        self._image = image = await in_thread(lambda: self._find_image(force_build))
        given: dict[str, Any] = {"image": image} if image else {}
        self._cell = cell = AdapterSession(policy=self._policy(), pool=0, sessions=LASTING, **given)
        await in_thread(lambda: cell.session)
        await self._apply_network_policy(self.network_policy)
        for place in (*self._mount_targets(), self._workdir):
            await in_thread(functools.partial(cell.files.make_directory, place))
        if image:
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        elif self._enable_environment_dir_upload and Path(self.environment_dir).is_dir():
            await self.upload_dir(self.environment_dir, self._workdir)

    async def stop(self, delete: bool) -> None:
        cell, self._cell = self._cell, None
        if cell is not None:
            await cell.aclose()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Run a line for bash; of more than 10 MiB of output the beginning is returned."""
        asked = self._resolve_user(user)
        if self._image is None:
            if asked not in _USERS:
                raise RuntimeError(f"user {asked!r}: a cell has one user, who owns its files")
            asked = None
        done = await self.cell.arun(
            ["bash", "-c", command], cwd=posixpath.join(self._workdir, cwd or ""),
            env=self._merge_env(env), timeout=timeout_sec, user=None if asked is None else str(asked),
        )  # fmt: skip
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        stdout, stderr = done.text
        if (tell := self._output_callback()) is not None:
            await tell(stdout, "stdout")
            await tell(stderr, "stderr")
        return ExecResult(stdout=stdout, stderr=stderr, return_code=done.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await in_thread(lambda: upload(self.cell, source_path, target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await in_thread(lambda: upload(self.cell, source_dir, target_dir))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await in_thread(lambda: download_file(self.cell, source_path, target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await in_thread(lambda: download(self.cell, source_dir, target_dir))
