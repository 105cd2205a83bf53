"""`RefusedHosts`: tells of hosts that programs may not reach, and how a person allows them."""

import contextlib
import threading
from collections.abc import Callable, Sequence

from ....policies.errors import CellwrightError
from ....runner.messages import Refusal
from ...text.terminal_text import harmless_line
from .network_control import PendingName, SandboxNetwork

_MOST = 10  # hosts that are told of: programs choose the names
_TLS = 443
_NOT_NAMED = ": no rule names its network"  # words of policies/network/address_ranges.py
_LOCAL = ("local", "localhost", "localdomain", "invalid", "arpa")


class RefusedHosts:
    """The hosts that a running command was refused, each told once.

    Where the command writes to pipes, the agent that started it reads the sentence among its errors, as
    a person does.  At a terminal, whose screen belongs to the command, the title has the way to allow
    the last host (`fileno`, `next_title`), and the sentences come at the end.
    """

    def __init__(
        self, network: SandboxNetwork, tell: Callable[[str], None], *, at_once: bool
    ) -> None:
        """`tell` gets the sentences, with `at_once` while the command runs, in another thread."""
        self._network, self._say = network, tell
        self._told: set[tuple[str, int]] = set()
        self._connections: list[Refusal] = []
        self._refused = network.refused()
        self._thread = None
        if at_once and self._refused:
            self._thread = threading.Thread(target=self._tell_all, daemon=True)
            self._thread.start()

    def fileno(self) -> int:
        return self._refused.fileno() if self._refused else -1

    def next_title(self) -> str | None:
        found = self._refused.next() if self._refused else None
        if found is None:
            raise EOFError
        if isinstance(found, Refusal) and found.what == "connection":
            self._connections.append(found)
            found = None
        waiting = [found] if isinstance(found, Refusal) else self._pending()
        hosts = [each for each in waiting if _is_host(each.name)]
        return _command(hosts[-1].name, hosts[-1].port) if hosts else None

    def _pending(self) -> Sequence[PendingName]:
        with contextlib.suppress(CellwrightError):  # the result tells that records are missing
            return self._network.pending()
        return ()

    def _tell_all(self) -> None:
        while self._refused and (found := self._refused.next()):
            if isinstance(found, Refusal) and found.what == "connection":
                self._tell_connection(found)
            elif isinstance(found, Refusal):
                self._tell(found.name, found.port)

    def _tell(self, name: str, port: int | None) -> None:
        if _is_host(name):
            from ..projects.known_programs import known_programs

            shown = harmless_line(name) + (f":{port}" if port else "")
            is_registry = name in known_programs().registries.hosts
            option = "--allow-registries" if is_registry else f"--allow {shown}"
            why = f"{shown} is not among the hosts that this command may reach"
            allowing = f"{_command(name, port)}, or from the start by {option}"
            self._tell_once(name, port or 0, f"{why}; to allow it: {allowing}")

    def _tell_connection(self, refused: Refusal) -> None:
        host = harmless_line(refused.name) + (f":{refused.port}" if refused.port != _TLS else "")
        what, not_named, _ = refused.reason.partition(_NOT_NAMED)
        sentence = f"a connection to {host} was refused: {what}"
        if not_named:
            sentence += f"; to allow it: --allow {host}@{what.split()[0]}"
        self._tell_once(refused.name, refused.port, harmless_line(sentence))

    def _tell_once(self, name: str, port: int, sentence: str) -> None:
        if (name, port) in self._told:
            return
        self._told.add((name, port))
        if len(self._told) <= _MOST:
            self._say(sentence)
        elif len(self._told) == _MOST + 1:
            self._say("and more hosts: cellwright network pending")

    def close(self) -> None:
        """Tell of those that were not told yet; the sandbox must be open."""
        if self._refused:
            self._refused.end()
        if self._thread:
            self._thread.join()
        if self._refused:
            self._refused.close()
        for each in self._pending():
            self._tell(each.name, each.port)
        for refused in self._connections:
            self._tell_connection(refused)


def _command(name: str, port: int | None) -> str:
    return f"cellwright network allow {harmless_line(name)}" + (f" --port {port}" if port else "")


def _is_host(name: str) -> bool:
    """Tell whether a person could mean to allow it: programs look up names of one label, and those that
    only a local network has, on their own."""
    return "." in name and name.rpartition(".")[2] not in _LOCAL
