"""`Snapshots`: files of sandboxes that clients keep as templates, for as long as the server runs."""

import secrets
import tempfile
from typing import IO, Any, NamedTuple

from ....policies.policy import MIB
from ..client_quota import ClientQuota

_MOST, _MOST_OF_ALL = 32, 256
_BYTES, _BYTES_OF_ALL = 1024 * MIB, 4096 * MIB


class E2bSnapshot(NamedTuple):
    """The files below a sandbox's home directory at one time."""

    id: str
    client: str
    sandbox: str
    name: str
    size: int
    archive: IO[bytes]

    def told(self) -> dict[str, Any]:
        """Return what E2B tells of a snapshot."""
        return {"snapshotID": self.id, "names": [self.name] if self.name else []}


class Snapshots:
    """All snapshots of a server, in temporary files; each client has a share of their room."""

    def __init__(self) -> None:
        self._all: dict[str, E2bSnapshot] = {}
        self._number = ClientQuota("snapshots", _MOST, _MOST_OF_ALL, "delete one")
        self._room = ClientQuota("bytes of snapshots", _BYTES, _BYTES_OF_ALL, "delete one")

    def keep(self, client: str, sandbox: str, name: str, archive: bytes) -> E2bSnapshot:
        """Keep an archive; raises QuotaExceeded."""
        self._number.take(client)
        try:
            self._room.take(client, len(archive))
        except BaseException:
            self._number.give_back(client)
            raise
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the snapshot
        file.write(archive)
        made = E2bSnapshot(f"s{secrets.token_hex(10)}", client, sandbox, name, len(archive), file)
        self._all[made.id] = made
        return made

    def of(self, client: str, sandbox: str = "", name: str = "") -> list[E2bSnapshot]:
        """Return a client's snapshots, those of one sandbox or with one name if given."""
        return [
            each for each in self._all.values()
            if each.client == client
            and sandbox in ("", each.sandbox) and name in ("", each.name, each.id)
        ]  # fmt: skip

    def find(self, client: str, template: str) -> E2bSnapshot | None:
        """Return a client's snapshot by its id or name, the newest of a name."""
        return next(reversed(self.of(client, name=template)), None) if template else None

    def archive_of(self, snapshot: E2bSnapshot) -> bytes:
        snapshot.archive.seek(0)
        return snapshot.archive.read()

    def delete(self, snapshot: E2bSnapshot) -> None:
        if self._all.pop(snapshot.id, None):
            self._number.give_back(snapshot.client)
            self._room.give_back(snapshot.client, snapshot.size)
            snapshot.archive.close()

    def close(self) -> None:
        for each in list(self._all.values()):
            self.delete(each)
