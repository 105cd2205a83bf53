"""The files of a session as one tar archive, and back."""

import contextlib
import io
import tarfile

from ..policies.errors import PolicyError, WorkspaceError
from ..runner.workspace import list_files, read_file


def pack(workspace: int) -> bytes:
    """Return every regular file in an archive in which nothing but name and content is told."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, seen in sorted(list_files(workspace).items()):
            with contextlib.suppress(WorkspaceError):  # it is not what it was a moment ago
                content = read_file(workspace, path, seen.size_bytes)
                member = tarfile.TarInfo(path)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    """Return the regular files of an archive; nothing is extracted here, and names are checked by who
    writes them.  Raises PolicyError."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            members = [member for member in archive if member.isreg()]
            return {member.name: _content(archive, member) for member in members}
    except tarfile.TarError as error:
        raise PolicyError(f"not a tar archive: {error}") from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""
