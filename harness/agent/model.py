"""`ModelClient`: asks a server with the chat-completions protocol, and survives its faults.

A server may be small and local (llama.cpp, Ollama, vLLM): slow to begin, out of memory for a moment,
or without the newer parts of the protocol.  A request that failed for such a reason is repeated; an
error says whether the run can be resumed.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from ...policies.closing import Closing
from ...policies.errors import ModelError, ModelUnavailable, PolicyError
from ...policies.extras import how_to_install
from ..text.hidden import line
from ..user_data import SecretSource, SecretUnreadable, read_secret
from .prompts import USUAL, Message, ModelReply, OnText, Sampling, ToolRequest, estimated_tokens

try:
    import httpx2
except ImportError:
    raise PolicyError(
        "the client of a model needs the package httpx2", how_to_install("agent")
    ) from None

KEY_VARIABLE = "OPENAI_API_KEY"
_MOST_BYTES = 8 << 20  # bytes of one answer, framing included
_MOST_CHARACTERS = 1 << 20  # characters in a reply
_MOST_REPLY_TOKENS = 4096
_MOST_REQUESTS = 32  # tool calls in one reply
_SHOWN = 300  # characters of a server's message quoted in an error
_FIRST_WAIT_SECONDS = 0.5  # doubled with each repetition
_LONGEST_WAIT_SECONDS = 30.0
_MAY_PASS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class ModelClient(Closing):
    """A model behind an endpoint with the chat-completions protocol.  Safe from many threads.

    `url`: the base, such as `http://127.0.0.1:8080/v1`. `model`: its name there; some servers have one
    and need none. `key`: the API key, or a source of it, such as `from_keyring(service, user)`, which
    is read once; by default $OPENAI_API_KEY. `timeout`: longest time in seconds without a byte, also
    before the first token. `reply_seconds`: longest time of one reply with its repetitions. `retries`:
    how often a request that failed for a reason that may pass is repeated. `context_tokens`: of the
    conversation with its reply, as the server was started. `reply_tokens`: the longest reply, by
    default a quarter of the context, at most 4,096. `extra`: further members of each request.

    Raises PolicyError for invalid arguments.
    """

    def __init__(
        self, url: str, model: str = "", *, key: str | SecretSource | None = None,
        timeout: float = 120.0, reply_seconds: float = 600.0, retries: int = 4,
        context_tokens: int = 16_384, reply_tokens: int | None = None,
        first_wait: float = _FIRST_WAIT_SECONDS,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._shown_url = _checked(url)
        if reply_tokens is None:
            reply_tokens = min(_MOST_REPLY_TOKENS, context_tokens // 4)
        if not 0 < reply_tokens < context_tokens:
            raise PolicyError(
                f"reply_tokens: must be > 0 and less than context_tokens, got {reply_tokens} of "
                f"{context_tokens}"
            )
        self.url, self.name, self.context_tokens = url.rstrip("/"), model, context_tokens
        self._reply_tokens, self._reply_seconds = reply_tokens, reply_seconds
        self._retries, self._first_wait = retries, first_wait
        self._extra = dict(extra)
        self._closed = threading.Event()
        self._counts_usage = True  # False once the server refuses to count usage
        headers = {"Accept-Encoding": "identity", **_authorization(key)}
        self._http = httpx2.Client(
            headers=headers, timeout=httpx2.Timeout(timeout), trust_env=True, follow_redirects=False
        )

    def ask(
        self, messages: Sequence[Message], sampling: Sampling = USUAL, *,
        schema: dict[str, Any] | None = None, on_text: OnText | None = None,
    ) -> ModelReply:  # fmt: skip
        """Return the reply to a conversation; `on_text` gets it in parts as they come.

        `schema`: a JSON Schema that the reply's text must match, where the server can do that.
        Raises ModelUnavailable if the server does not answer, or fails each time; ModelError if it
        refuses the request, or its answer is not of the protocol.
        """
        body = self._body(messages, sampling, schema)
        deadline = time.monotonic() + self._reply_seconds
        for wait in (*self._waits(), None):
            try:
                return self._completed(messages, self._exchange(body, on_text, deadline))
            except _MayPassError as failure:
                if wait is None or time.monotonic() + wait > deadline:
                    raise ModelUnavailable(
                        f"the model at {self._shown_url} does not answer: {failure}",
                        "start the server, and resume the run",
                    ) from failure
                if self._closed.wait(max(wait, failure.wait_seconds)):
                    raise ModelUnavailable("the client of the model was closed") from None
        raise AssertionError("the last turn returns or raises")

    def close(self) -> None:
        """Close the connections; closing twice is fine."""
        self._closed.set()
        self._http.close()

    def _waits(self) -> Iterator[float]:
        for turn in range(self._retries):
            yield min(self._first_wait * 2**turn, _LONGEST_WAIT_SECONDS)

    def _body(
        self, messages: Sequence[Message], sampling: Sampling, schema: dict[str, Any] | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": each.role, "content": each.text} for each in messages],
            "stream": True,
            "temperature": sampling.temperature,
            "max_tokens": self._reply_tokens,
        }
        if self.name:
            body["model"] = self.name
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if schema is not None:
            shape = {"name": "reply", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": shape}
        return body | self._extra

    def _exchange(self, body: dict[str, Any], on_text: OnText | None, deadline: float) -> "_Answer":
        """Send one request and read its answer; raises _MayPassError if it may be repeated."""
        if self._counts_usage:
            body = body | {"stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as response:
                if response.status_code == httpx2.codes.OK:
                    return _read(response, on_text, deadline)
                words = _words(response, deadline)
                if response.status_code == httpx2.codes.BAD_REQUEST and self._counts_usage:
                    self._counts_usage = False  # an older server
                    raise _MayPassError(words)
                if response.status_code in _MAY_PASS:
                    raise _MayPassError(words, _retry_after(response))
                raise ModelError(
                    f"the model at {self._shown_url} refuses: {words}", _way_out(response)
                )
        except httpx2.TimeoutException:
            raise _MayPassError("nothing came in time") from None
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise _MayPassError(str(error) or type(error).__name__) from None

    def _completed(self, messages: Sequence[Message], answer: "_Answer") -> ModelReply:
        text = "".join(answer.parts)
        asked, said = answer.usage
        if asked or said:
            return answer.reply(text, asked, said, is_estimated=False)
        asked = sum(estimated_tokens(each.text) for each in messages)
        return answer.reply(text, asked, estimated_tokens(text), is_estimated=True)


def _checked(url: str) -> str:
    """Return a URL as errors may show it, without a password; raises PolicyError for an invalid one."""
    try:
        parsed = httpx2.URL(url)
        if parsed.scheme in ("http", "https") and parsed.host:
            return str(parsed.copy_with(userinfo=b"")).rstrip("/")
    except httpx2.InvalidURL:
        pass
    raise PolicyError(
        f"model: must be the URL of a server, got {url!r}",
        "llama-server and vLLM have http://127.0.0.1:8080/v1",
    )


def _authorization(key: str | SecretSource | None) -> dict[str, str]:
    """Return the header of a key; raises PolicyError, without the key, for one that cannot be had."""
    try:
        text = os.environ.get(KEY_VARIABLE, "") if key is None else read_secret(key)
    except SecretUnreadable as error:
        raise PolicyError(f"key: cannot be read: {error}") from None
    if not (text.isascii() and text.isprintable()):
        raise PolicyError("key: must be printable ASCII characters, in one line")
    return {"Authorization": f"Bearer {text}"} if text else {}


class _MayPassError(Exception):
    """The request failed for a reason that may pass."""

    def __init__(self, words: str, wait_seconds: float = 0.0) -> None:
        super().__init__(words)
        self.wait_seconds = wait_seconds


class _Answer:
    """An answer while it is read, in the parts of a stream or at once."""

    def __init__(self, on_text: OnText | None) -> None:
        self.parts: list[str] = []
        self.finish = ""
        self.usage = (0, 0)
        self._on_text = on_text
        self._length = 0
        self._requests: dict[int, list[str]] = {}  # by index: name and pieces of arguments

    def add(self, chunk: object) -> None:
        """Process one JSON value of the server; unknown members are ignored."""
        if not isinstance(chunk, dict):
            return
        if chunk.get("error"):
            raise _MayPassError(line(str(chunk["error"]), _SHOWN))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, dict):
            self.finish = str(choice.get("finish_reason") or self.finish)
            said = choice.get("delta") or choice.get("message")
            if isinstance(said, dict):
                self._add_text(said.get("content"))
                self._add_requests(said.get("tool_calls"))

    def _add_text(self, text: object) -> None:
        if not isinstance(text, str) or not text:
            return
        room = _MOST_CHARACTERS - self._length
        self._length += len(text)
        if room > 0:
            self.parts.append(text[:room])
            if self._on_text:
                self._on_text(text[:room])
        if self._length > _MOST_CHARACTERS:
            self.finish = "length"

    def _add_requests(self, calls: object) -> None:
        for place, each in enumerate(calls if isinstance(calls, list) else ()):
            function = each.get("function") if isinstance(each, dict) else None
            index = each.get("index", place) if isinstance(each, dict) else place
            if not isinstance(function, dict) or index not in range(_MOST_REQUESTS):
                continue
            request = self._requests.setdefault(index, ["", ""])
            for at, key in enumerate(("name", "arguments")):
                part = function.get(key)
                text = part if isinstance(part, str) else "" if part is None else _json(part)
                request[at] = (request[at] + text)[:_MOST_CHARACTERS]

    def reply(self, text: str, asked: int, said: int, *, is_estimated: bool) -> ModelReply:
        requests = [ToolRequest(*self._requests[place]) for place in sorted(self._requests)]
        return ModelReply(
            text=text, requests=tuple(requests), finish=self.finish or "cut",
            input_tokens=asked, output_tokens=said, is_estimated=is_estimated,
        )  # fmt: skip


def _read(response: httpx2.Response, on_text: OnText | None, deadline: float) -> _Answer:
    """Read an answer: server-sent events, or one JSON value of a server that does not stream."""
    answer = _Answer(on_text)
    lines = _lines(response, deadline)
    if "event-stream" not in response.headers.get("content-type", ""):
        with _decoding():
            answer.add(msgspec.json.decode(b"\n".join(lines)))
        return answer
    for each in lines:
        data = each.removeprefix(b"data:").strip()
        if not each.startswith(b"data:") or not data:
            continue
        if data == b"[DONE]":
            break
        with _decoding():
            answer.add(msgspec.json.decode(data))
        if answer.finish == "length" and not answer.usage[1]:
            continue  # the usage may follow
    return answer


def _lines(response: httpx2.Response, deadline: float) -> Iterator[bytes]:
    """Return the lines of an answer of at most _MOST_BYTES; the rest is not read."""
    held: list[bytes] = []  # pieces of a line that may arrive byte by byte
    for part, is_last in _parts(response, deadline, _MOST_BYTES):
        first, *lines = part.split(b"\n")
        held.append(first)
        if lines:
            yield b"".join(held)
            yield from lines[:-1]
            held = [lines[-1]]
        if is_last:
            return
    yield b"".join(held)


def _parts(response: httpx2.Response, deadline: float, most: int) -> Iterator[tuple[bytes, bool]]:
    """Return the parts of an answer, and whether a part goes beyond `most` bytes, which ends it.

    A compressed answer is refused: a few bytes could be unpacked to gigabytes.
    """
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _MayPassError("its answer is compressed")
    for part in response.iter_raw():
        most -= len(part)
        yield part, most < 0
        if most < 0:
            return
        if time.monotonic() > deadline:
            raise _MayPassError("its reply took too long")


@contextlib.contextmanager
def _decoding() -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError):
        raise _MayPassError("its answer is not JSON") from None


def _words(response: httpx2.Response, deadline: float) -> str:
    most = 16 * _SHOWN
    data = b"".join(part for part, _ in _parts(response, deadline, most))[:most]
    try:
        said = msgspec.json.decode(data)
        error = said.get("error", said) if isinstance(said, dict) else said
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        text = data.decode(errors="replace")
    return f"{response.status_code} {line(text, _SHOWN)}".rstrip()


def _way_out(response: httpx2.Response) -> str:
    if response.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN):
        return f"set {KEY_VARIABLE}, or pass key="
    if response.status_code == httpx2.codes.NOT_FOUND:
        return "the URL must end before /chat/completions, often in /v1, and the model must exist"
    return ""


def _retry_after(response: httpx2.Response) -> float:
    """Return the seconds that the server asks to wait, within our own bound."""
    try:
        seconds = float(response.headers.get("retry-after", 0))
    except ValueError:  # a date
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS)


def _count(usage: Mapping[str, object], key: str) -> int:
    found = usage.get(key)
    return found if isinstance(found, int) and 0 <= found < 1 << 32 else 0


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
