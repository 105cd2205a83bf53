"""Cells of a daemon, for a `Sandbox(connect=path)`: the client side of the daemon's socket."""

from typing import TYPE_CHECKING

from ....policies.errors import PolicyError
from ....policies.plan import Plan
from ....runner.capture import OnOutput
from ....runner.result import SandboxResult
from ..parameters import CallArguments, CommandArguments, ProgramArguments, SessionArguments
from .arguments import requirements_of, token_of
from .connections import ConnectionPool
from .frames import (
    AwaitSettled,
    Describe,
    Description,
    DiscardPaused,
    Done,
    Opened,
    OpenSession,
    ResumeSession,
    Validate,
    Validated,
)
from .requests import Requests

if TYPE_CHECKING:
    from ....runner.audit.log import AuditLog
    from ....runner.supervisors import SupervisorsState
    from ...privacy.privacy import Privacy
    from ..network import SandboxNetwork
    from ..program import Program
    from ..sandbox_arguments import PolicyLike
    from ..sandbox_skills import SandboxSkills
    from ..session import Session
    from ..workspaces.store import Workspaces


class DaemonsCells:
    """Cells of the daemon that listens at `path`, under its policy of that name."""

    audit: "AuditLog | None" = None  # the daemon keeps the trail
    privacy: "Privacy | None" = None

    def __init__(self, path: str, policy: "PolicyLike | None") -> None:
        if not isinstance(policy, str | None):
            raise PolicyError(
                f"policy: must name a policy of the daemon with connect=, got {policy!r}"
            )
        self._requests = Requests(ConnectionPool(path, policy or ""))
        try:
            described = self._requests.ask(Describe(), Description)
        except BaseException:
            self.close()
            raise
        self.policy = described.policy
        self.plan: Plan = described.plan

    @property
    def workspaces(self) -> "Workspaces":
        raise PolicyError("workspaces: not available with connect=")

    @property
    def network(self) -> "SandboxNetwork":
        raise PolicyError(
            "network: not available with connect=",
            "the owner of the daemon decides on the network rules of its policies",
        )

    @property
    def skills(self) -> "SandboxSkills":
        raise PolicyError("skills: not available with connect=")

    def private_to(self, client: str) -> None:
        """Do nothing: a daemon has no personal data."""

    def with_tokens(self, given: CommandArguments) -> CommandArguments:
        return given

    def execute(
        self, given: CallArguments, on_output: OnOutput | None, cancel: int
    ) -> SandboxResult:
        _refuse_local(given)
        return self._requests.execute(given, on_output, cancel, self.policy.limits)

    def program(self, given: ProgramArguments) -> "Program":
        raise PolicyError(
            "program: not available with connect=",
            "make a Sandbox without connect=",
        )

    def session(self, given: SessionArguments) -> "Session":
        from .session import AttachedSession  # a command that runs one program opens none

        _refuse_local(given)
        packages = requirements_of(given.packages)
        opened = self._requests.ask(OpenSession(given.id, given.language, packages), Opened)
        return AttachedSession(self._requests, opened, self.policy.limits)

    def resume(self, token: str) -> "Session":
        from .session import AttachedSession  # a command that runs one program resumes none

        opened = self._requests.ask(ResumeSession(token_of(token)), Opened)
        return AttachedSession(self._requests, opened, self.policy.limits)

    def discard(self, token: str) -> None:
        self._requests.ask(DiscardPaused(token_of(token)), Done)

    def has_tool(self, name: str) -> bool:
        return False  # the daemon does not tell, and records no runs

    def validate_source(self, code: str) -> tuple[bool, str | None]:
        judged = self._requests.ask(Validate(code.encode(errors="surrogatepass")), Validated)
        return judged.passes, judged.finding

    def state(self) -> "SupervisorsState":
        raise PolicyError("state: these are the cells of a daemon", 'ask it: "cellwright status"')

    def settle(self) -> None:
        self._requests.ask(AwaitSettled(), Done)

    def close(self) -> None:
        self._requests.pool.close()


def _refuse_local(given: CallArguments | SessionArguments) -> None:
    if given.workspace is not None or given.clean:
        raise PolicyError(
            "workspace: not available with connect=",
            "move files with snapshot() and restore() of a session",
        )
