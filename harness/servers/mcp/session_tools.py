"""The tools `sessions`, `list_files`, `download_file` and `upload_file`."""

import base64
import binascii
import mimetypes

from msgspec import UNSET

from ....policies.errors import PolicyError, WorkspaceError
from ....runner.workspace import Artifact
from ...sandbox.sandbox import Sandbox
from ...sandbox.session import Session
from ..owned_sessions import ListedSession, OwnedSessions
from .answer_sizes import fitted, visible
from .answers import Downloaded, FileList, SessionList, Uploaded, answered, block_of
from .arguments import (
    DownloadFileArguments,
    ListFilesArguments,
    SessionsArguments,
    UploadFileArguments,
)
from .calls import Outcome
from .clients import Owner

_DOWNLOAD_BYTES = 8 * 1024 * 1024
_UNLISTED = "sessions cannot be listed over this protocol: use their ids"


def sessions(
    open_sessions: OwnedSessions, owner: Owner, asked: SessionsArguments, sandbox: Sandbox
) -> Outcome:
    """Close, branch or pause the named sessions if any, and list those that exist then.

    Only one of the three is done in one call: if it fails, nothing was done.
    """
    if sum(map(bool, (asked.close, asked.branch, asked.pause))) > 1:
        raise PolicyError("sessions: give one of close, branch and pause")
    made: tuple[Session, ...] = ()
    if asked.close:
        open_sessions.close(owner, asked.close)
    elif asked.pause:
        open_sessions.pause(owner, asked.pause, sandbox)
    elif asked.branch:
        made = open_sessions.branch(owner, asked.branch, asked.branches)
    listed = open_sessions.listed(owner) if owner.may_list else []
    return answered(
        SessionList(
            sessions=list(map(_told, listed)), branches=[each.id for each in made],
            hint="" if owner.may_list else _UNLISTED,
        )
    )  # fmt: skip


def _told(session: ListedSession) -> dict[str, str]:
    told = {"id": session.id, "language": session.language}
    return told | {"state": "paused"} if session.is_paused else told


def list_files(open_sessions: OwnedSessions, owner: Owner, asked: ListFilesArguments) -> Outcome:
    """List the files of a session."""
    files = open_sessions.get(owner, asked.session).files()
    told = {"files": visible({file.path: file.size_bytes for file in files})}
    parts, cut = fitted(told, owner.answer_bytes)
    return answered(FileList(hint="; ".join(cut), **parts))


def download_file(
    open_sessions: OwnedSessions, owner: Owner, asked: DownloadFileArguments
) -> Outcome:
    """Return a file: as an image if it is one, else as a resource."""
    session = open_sessions.get(owner, asked.session)
    sizes = {file.path: file.size_bytes for file in session.files()}
    most = min(_DOWNLOAD_BYTES, owner.answer_bytes * 7 // 10)  # base64 takes 4 bytes for 3
    _check_size(asked.path, sizes.get(asked.path, 0), most)
    data = session.download(asked.path)
    _check_size(
        asked.path, len(data), most
    )  # the path was spelled differently, or the file has grown
    mime = mimetypes.guess_type(f"/{asked.path}")[0] or "application/octet-stream"
    artifact = Artifact(asked.path, mime, data)
    return answered(
        Downloaded(path=asked.path, bytes=len(data)), [block_of(artifact, asked.session)]
    )


def _check_size(path: str, size: int, most: int) -> None:
    if size > most:
        raise WorkspaceError(
            f"{path}: {size} bytes, more than the {most} of one answer",
            "split it with a program",
        )


def upload_file(open_sessions: OwnedSessions, owner: Owner, asked: UploadFileArguments) -> Outcome:
    """Put a file into a session."""
    data = _content(asked)
    open_sessions.get(owner, asked.session).upload(asked.path, data)
    return answered(Uploaded(path=asked.path, bytes=len(data)))


def _content(asked: UploadFileArguments) -> bytes:
    if (asked.text is UNSET) == (asked.base64 is UNSET):
        raise PolicyError("upload_file: give either text or base64")
    if asked.base64 is UNSET:
        return str(asked.text).encode("utf-8", "replace")
    try:
        return base64.b64decode(str(asked.base64), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PolicyError(f"base64: {error}") from None
