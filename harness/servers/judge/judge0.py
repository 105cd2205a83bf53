"""The interface of Judge0: `/submissions`, `/languages`, `/statuses`, `/config_info`.

Fields and numbers are those of judge0/judge0, docs/api.  Languages have the ids of Judge0 1.13 where it
knows them.
"""

import base64
import binascii
import logging
import signal
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....policies.errors import CellwrightError, QuotaExceeded
from ....policies.policy import MIB
from ...sandbox.judging.verdicts import Case, JudgeLimits, Verdict
from ..client_quota import ClientQuota
from ..served_requests import KeptAnswers, KeptLimits
from .judging_core import (
    DialectError,
    JudgedRun,
    JudgingCore,
    Seconds,
    Until,
    answer,
    body_of,
    client_of,
    until_gone_of,
)

_log = logging.getLogger(__name__)
KIB = 1024
_Kibibytes = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_LANGUAGES = {
    45: ("assembly", "Assembly (NASM)"), 46: ("bash", "Bash"),
    # Versions of one language have ids of their own; clients ask for any of them.
    **dict.fromkeys((48, 49, 50, 75), ("c", "C (GCC)")),
    **dict.fromkeys((52, 53, 54, 76), ("cpp", "C++ (GCC)")),
    51: ("csharp", "C# (Mono)"), 56: ("d", "D"),
    59: ("fortran", "Fortran (GFortran)"), 60: ("go", "Go"), 61: ("haskell", "Haskell (GHC)"),
    62: ("java", "Java (OpenJDK)"), 63: ("javascript", "JavaScript (Node.js)"), 64: ("lua", "Lua"),
    65: ("ocaml", "OCaml"), 67: ("pascal", "Pascal (FPC)"), 68: ("php", "PHP"),
    71: ("python", "Python"), 72: ("ruby", "Ruby"), 73: ("rust", "Rust"),
    74: ("typescript", "TypeScript"), 78: ("kotlin", "Kotlin"), 80: ("r", "R"), 81: ("scala", "Scala"),
    82: ("sql", "SQL (SQLite)"), 83: ("swift", "Swift"), 85: ("perl", "Perl"),
}  # fmt: skip
_STATUSES = (
    "In Queue", "Processing", "Accepted", "Wrong Answer", "Time Limit Exceeded", "Compilation Error",
    "Runtime Error (SIGSEGV)", "Runtime Error (SIGXFSZ)", "Runtime Error (SIGFPE)",
    "Runtime Error (SIGABRT)", "Runtime Error (NZEC)", "Runtime Error (Other)", "Internal Error",
    "Exec Format Error",
)  # fmt: skip
_QUEUED, _PROCESSING, _INTERNAL = 1, 2, 13
_OF_VERDICT = {
    Verdict.ACCEPTED: 3, Verdict.WRONG_ANSWER: 4, Verdict.PRESENTATION_ERROR: 4,
    Verdict.TIME_LIMIT: 5, Verdict.COMPILE_ERROR: 6, Verdict.OUTPUT_LIMIT: 8,
    Verdict.MEMORY_LIMIT: 12, Verdict.SECURITY_VIOLATION: 12, Verdict.INTERNAL_ERROR: 13,
}  # fmt: skip
_OF_SIGNAL: dict[int, int] = {
    signal.SIGSEGV: 7,
    signal.SIGXFSZ: 8,
    signal.SIGFPE: 9,
    signal.SIGABRT: 10,
}
_MOST_IN_BATCH = 20
_KEPT = KeptLimits(10_000, 256 * MIB)
_KEPT_OF_ONE = KeptLimits(5_000, 128 * MIB)
_WAITING_BYTES_OF_ONE, _WAITING_BYTES = 256 * MIB, 1024 * MIB
_KEPT_SECONDS = 3600.0
_TEXTS = ("source_code", "stdin", "expected_output")
_ENCODED = ("stdout", "stderr", "compile_output", "message")
_LIMITS: dict[str, float] = {
    "cpu_time_limit": 2.0, "cpu_extra_time": 0.5, "wall_time_limit": 10.0, "memory_limit": 256_000,
    "stack_limit": 64_000, "max_processes_and_or_threads": 60, "max_file_size": 16_384,
    "number_of_runs": 1,
}  # fmt: skip
_VERSION = "1.13.1"  # clients know the ids of languages by it
_CONFIG = _LIMITS | {
    "maintenance_mode": False, "enable_wait_result": True, "enable_compiler_options": True,
    "allowed_languages_for_compile_options": [], "enable_command_line_arguments": True,
    "enable_submission_delete": False, "enable_callbacks": False, "callbacks_max_tries": 0,
    "callbacks_timeout": 0, "enable_additional_files": False, "max_extract_size": 0,
    "enable_batched_submissions": True, "max_submission_batch_size": _MOST_IN_BATCH,
    "max_queue_size": 1_000_000, "submission_cache_duration": _KEPT_SECONDS,
    "use_docs_as_homepage": False, "redirect_stderr_to_stdout": False, "max_number_of_runs": 1,
    "max_cpu_extra_time": _LIMITS["cpu_extra_time"], "enable_network": False,
    "allow_enable_network": False,
} | {
    f"{allow}per_process_and_thread_{limit}_limit": False
    for allow in ("enable_", "allow_enable_") for limit in ("time", "memory")
}  # fmt: skip


class Submission0(msgspec.Struct, kw_only=True):
    """A request of `/submissions`: seconds and KiB."""

    source_code: str
    language_id: int
    stdin: str | None = None
    expected_output: str | None = None
    compiler_options: str | None = None
    command_line_arguments: str | None = None
    cpu_time_limit: Seconds | None = None
    wall_time_limit: Seconds | None = None
    memory_limit: _Kibibytes | None = None
    stack_limit: _Kibibytes | None = None
    max_processes_and_or_threads: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_file_size: _Kibibytes | None = None


class Batch0(msgspec.Struct, kw_only=True):
    submissions: list[Submission0]


class KeptSubmission(msgspec.Struct, kw_only=True):
    """A submission that was taken, and its answer so far."""

    client: str
    answer: dict[str, Any]
    done: Any = None  # anyio.Event

    @property
    def size_bytes(self) -> int:
        return sum(len(self.answer[name] or "") for name in _ENCODED)


class Judge0:
    """The routes of Judge0.  Answers are kept for an hour, unless newer ones of the same client, or of
    all, take their room."""

    def __init__(self, core: JudgingCore) -> None:
        self._core = core
        self._waiting: dict[str, KeptSubmission] = {}
        self._waiting_bytes = ClientQuota(
            "bytes of waiting submissions", _WAITING_BYTES_OF_ONE, _WAITING_BYTES
        )
        self._kept = KeptAnswers[KeptSubmission](
            lambda kept: kept.size_bytes, _KEPT, _KEPT_OF_ONE, seconds=_KEPT_SECONDS
        )
        self.tasks: Any = None  # the task group of the application

    async def submit(self, request: Request) -> Response:
        """Take a submission; with `wait=true` answer once it is judged."""
        asked = await body_of(request, Submission0)
        if request.query_params.get("wait") != "true":
            return answer({"token": self._take(request, asked).answer["token"]}, 201)
        # Nobody else has its token.
        kept = self._take(request, asked, until_gone_of(request))
        await kept.done.wait()
        return answer(_shown(request, kept), 201)

    async def submit_batch(self, request: Request) -> Response:
        """Take up to 20 submissions."""
        asked = await body_of(request, Batch0)
        if not 0 < len(asked.submissions) <= _MOST_IN_BATCH:
            raise DialectError(422, f"submissions: from 1 to {_MOST_IN_BATCH}")
        taken = [self._take(request, each) for each in asked.submissions]
        return answer([{"token": each.answer["token"]} for each in taken], 201)

    async def get(self, request: Request) -> Response:
        """Return a submission."""
        return answer(_shown(request, self._of(request, request.path_params["token"])))

    async def get_batch(self, request: Request) -> Response:
        """Return submissions."""
        tokens = [each for each in request.query_params.get("tokens", "").split(",") if each]
        shown = [_shown(request, self._of(request, each)) for each in tokens[:1000]]
        return answer({"submissions": shown})

    async def languages(self, _: Request) -> Response:
        return answer([{"id": id, "name": name} for id, (_, name) in sorted(_LANGUAGES.items())])

    async def language(self, request: Request) -> Response:
        number = request.path_params["id"]
        if number not in _LANGUAGES:
            raise DialectError(404, f"there is no language {number}")
        return answer({"id": number, "name": _LANGUAGES[number][1], "is_archived": False})

    async def about(self, _: Request) -> Response:
        """Tell the version of Judge0 whose ids of languages these are."""
        return answer({"version": _VERSION, "homepage": "", "source_code": "", "maintainer": ""})

    async def statuses(self, _: Request) -> Response:
        return answer([{"id": id, "description": text} for id, text in enumerate(_STATUSES, 1)])

    async def config_info(self, _: Request) -> Response:
        most, gibi = self._core.most(), 1024 * MIB
        return answer(
            _CONFIG
            | {
                "max_cpu_time_limit": most.wall_seconds, "max_wall_time_limit": most.wall_seconds,
                "max_memory_limit": most.memory_bytes // KIB, "max_stack_limit": gibi // KIB,
                "max_max_processes_and_or_threads": most.processes,
                "max_max_file_size": most.output_bytes // KIB,
            }
        )  # fmt: skip

    def _of(self, request: Request, token: str) -> KeptSubmission:
        kept = self._waiting.get(token) or self._kept.kept(token)
        if kept is None or kept.client != client_of(request):
            raise DialectError(404, "not found")
        return kept

    def _take(
        self, request: Request, asked: Submission0, until: Until = anyio.sleep_forever
    ) -> KeptSubmission:
        """Take a submission; it is given up once `until` returns."""
        if asked.language_id not in _LANGUAGES:
            raise DialectError(422, f"language_id: there is no language {asked.language_id}")
        if request.query_params.get("base64_encoded") == "true":
            asked = msgspec.structs.replace(asked, **_decoded(asked))
        token, client = str(uuid.uuid4()), client_of(request)
        size = sum(len(getattr(asked, name) or "") for name in _TEXTS)
        try:
            self._waiting_bytes.take(client, size)
        except QuotaExceeded as error:
            raise DialectError(503, f"queue is full: {error}") from None
        kept = KeptSubmission(
            client=client, done=anyio.Event(),
            answer=dict.fromkeys(
                ("stdout", "stderr", "compile_output", "message", "exit_code", "exit_signal", "time",
                 "wall_time", "memory", "finished_at")
            ) | {"token": token, "status": _status(_QUEUED), "created_at": _now()},
        )  # fmt: skip
        self._waiting[token] = kept
        self._kept.begin(token, b"", client)
        self.tasks.start_soon(self._judge, kept, asked, size, until)
        return kept

    async def _judge(
        self, kept: KeptSubmission, asked: Submission0, size: int, until: Until
    ) -> None:
        try:
            done = await self._core.work(kept.client, partial(self._run, kept, asked), until)
            kept.answer |= _answered(done)
        except (CellwrightError, DialectError) as error:
            kept.answer |= {"status": _status(_INTERNAL), "message": str(error)}
        except Exception:  # noqa: BLE001 - else one submission would end the task group of all
            _log.exception("a submission failed")
            kept.answer |= {"status": _status(_INTERNAL), "message": "internal error"}
        finally:
            kept.answer["finished_at"] = _now()
            self._kept.end(kept.answer["token"], kept)
            del self._waiting[kept.answer["token"]]
            self._waiting_bytes.give_back(kept.client, size)
            kept.done.set()

    def _run(self, kept: KeptSubmission, asked: Submission0, cancel: int) -> JudgedRun:
        kept.answer["status"] = _status(_PROCESSING)
        seconds = asked.cpu_time_limit or _LIMITS["cpu_time_limit"]
        limits = JudgeLimits(
            time_seconds=seconds,
            wall_seconds=max(asked.wall_time_limit or 0, 2 * seconds, 10.0),
            memory_bytes=max(round((asked.memory_limit or _LIMITS["memory_limit"]) * KIB), 8 * MIB),
            stack_bytes=max(round((asked.stack_limit or _LIMITS["stack_limit"]) * KIB), MIB),
            processes=asked.max_processes_and_or_threads or 60,
            output_bytes=round((asked.max_file_size or _LIMITS["max_file_size"]) * KIB),
        )  # fmt: skip
        expected = asked.expected_output
        return self._core.run_once(
            asked.source_code, _LANGUAGES[asked.language_id][0],
            Case(
                input=asked.stdin or "", expected=expected,
                arguments=tuple((asked.command_line_arguments or "").split()),
            ),
            limits, flags=tuple((asked.compiler_options or "").split()), checker="lines",
            cancel=cancel,
        )  # fmt: skip


def _answered(done: JudgedRun) -> dict[str, Any]:
    compiled, ran = done
    told: dict[str, Any] = {"compile_output": (compiled and compiled.output) or None}
    if ran is None:
        return told | {"status": _status(6), "message": compiled.error if compiled else None}
    number = _OF_VERDICT.get(ran.verdict)
    if number is None:  # a runtime error
        number = _OF_SIGNAL.get(ran.signal, 12) if ran.signal else 11
    return told | {
        "stdout": ran.stdout or None, "stderr": ran.stderr or None, "status": _status(number),
        "exit_code": ran.exit_code, "exit_signal": ran.signal, "time": f"{ran.seconds:.3f}",
        "wall_time": f"{ran.wall_seconds:.3f}", "memory": ran.memory_bytes // KIB,
        "message": None if ran.verdict is Verdict.WRONG_ANSWER else ran.message or None,
    }  # fmt: skip


def _status(number: int) -> dict[str, Any]:
    return {"id": number, "description": _STATUSES[number - 1]}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _decoded(asked: Submission0) -> dict[str, str]:
    try:
        return {
            name: base64.b64decode(text).decode()
            for name in _TEXTS
            if (text := getattr(asked, name)) is not None
        }
    except (binascii.Error, UnicodeDecodeError) as error:
        raise DialectError(422, f"not text in base64: {error}") from None


def _shown(request: Request, kept: KeptSubmission) -> dict[str, Any]:
    shown = dict(kept.answer)
    if request.query_params.get("base64_encoded") == "true":
        for name in _ENCODED:
            if shown[name] is not None:
                shown[name] = base64.b64encode(shown[name].encode()).decode()
    fields = request.query_params.get("fields")
    if fields and fields != "*":
        wanted = fields.split(",")
        shown = {name: value for name, value in shown.items() if name in wanted}
    return shown
