"""`Research`: looks things up for an agent, in folders of the host and where its rules let HTTP go.

Findings are data from outside, and each names its source. A page of HTML becomes text in a cell,
because a parser of hostile bytes does not belong in this process.
"""

import base64
import contextlib
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, quote_plus, urljoin, urlsplit

from ...policies.errors import CellwrightError, PolicyError, ToolFailed, ToolNotFound
from ..sandbox.packages.lock import normalised
from ..sandbox.packages.package_sources import settings_of_pip
from ..sandbox.sandbox import Sandbox
from ..search.documents import document_of
from ..search.search import SearchIndex
from ..text.hidden import line, prose
from ..tools.http.http_client import HttpClient
from ..tools.http.http_tool import http_tool
from ..tools.tool import Caller

_SUFFIXES = (".md", ".rst", ".txt")
_MOST_FILES, _MOST_BYTES = 2000, 1 << 20
_SHOWN, _PAGE = 400, 20_000  # characters of a finding, and of a page
_HOST = Caller()
_PROJECT = "application/vnd.pypi.simple.v1+json"  # packaging.python.org, "Simple repository API"
_SUMMARY = re.compile(r"^Summary: (.+)$", re.MULTILINE)
# Runs in a cell: extracts the text of HTML without scripts and styles.
_TO_TEXT = """\
import html.parser

class Text(html.parser.HTMLParser):
    hidden, parts = 0, []
    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("script", "style", "head", "svg", "nav")
        if tag in ("p", "br", "div", "li", "tr", "pre", "h1", "h2", "h3"):
            self.parts.append("\\n")
    def handle_endtag(self, tag):
        self.hidden = max(0, self.hidden - (tag in ("script", "style", "head", "svg", "nav")))
    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data)

text = Text()
text.feed(page)
lines = (" ".join(each.split()) for each in "".join(text.parts).splitlines())
"\\n".join(each for each in lines if each)
"""


class ResearchFinding(NamedTuple):
    """One thing that was found: `source` is a URL or the path of a file; `text` is untrusted."""

    title: str
    source: str
    text: str


class Research:
    """Looks things up.  Without arguments it finds nothing.

    `http`: makes requests that its rules allow; without it there are no requests. `search_url`: a
    search engine that answers as SearXNG does (`/search?q=...&format=json`). `github`: ask it too, if
    the rules allow `api.github.com`. `pypi`: ask the index of packages that pip's settings name
    (`global.index-url`), if the rules allow its host. `folders`: of documents on this host.
    `installed`: the packages of this Python are documents too, by name and summary.
    """

    def __init__(
        self, http: HttpClient | None = None, *, search_url: str = "", github: bool = False,
        pypi: bool = False, folders: Sequence[str | os.PathLike[str]] = (),
        installed: bool = False,
    ) -> None:  # fmt: skip
        if (search_url or github or pypi) and http is None:
            raise PolicyError(
                "http: is missing", "pass HttpClient([NetworkRule(...)]) with the hosts to ask"
            )
        for each in folders:
            if not os.path.isdir(each):
                raise PolicyError(f"folders: not a directory: {os.fspath(each)!r}")
        self._request = http_tool(http) if http else None
        self._engines: list[Callable[[str, Caller], list[ResearchFinding]]] = []
        if search_url:
            self._search_url = search_url
            self._engines.append(self._searched)
        if github:
            self._engines.append(self._on_github)
        if pypi:
            self._package_index = _index_of_pip()
            self._engines.append(self._on_pypi)
        self._folders = [Path(each) for each in folders]
        self._real_folders = [Path(os.path.realpath(each)) for each in folders]
        self._installed = installed
        self._index: SearchIndex | None = None

    def search(self, query: str, caller: Caller = _HOST, limit: int = 5) -> list[ResearchFinding]:
        """Return findings of each source in turn; a source that fails is a finding that says so."""
        found: list[list[ResearchFinding]] = [self._local(query, limit)]
        for engine in self._engines:
            try:
                found.append(engine(query, caller)[:limit])
            except CellwrightError as error:
                found.append([ResearchFinding("not available", "", line(error.what))])
        turns = max(map(len, found))
        mixed = [each[turn] for turn in range(turns) for each in found if turn < len(each)]
        return mixed[: limit * len(found)]

    def read(self, source: str, sandbox: Sandbox, caller: Caller = _HOST) -> str:
        """Return the text of a page or of a file of the folders.

        Raises ToolNotFound for a file elsewhere, and the exceptions of the request.
        """
        if "://" not in source:
            return self._file(Path(source))
        answer = self._answered(source, caller)
        text = str(answer.get("body") or answer.get("response_json") or "")
        if "html" in answer.get("headers", {}).get("content-type", ""):
            done = sandbox.execute(_TO_TEXT, inputs={"page": text[:_MOST_BYTES]})
            if not done.ok:
                raise ToolFailed(f"{line(source)}: the page cannot be read: {done.error}")
            text = str(done.value)
        return prose(text, _PAGE)

    # sources

    def _searched(self, query: str, caller: Caller) -> list[ResearchFinding]:
        joint = "&" if "?" in self._search_url else "?"
        told = self._json(f"{self._search_url}{joint}q={quote_plus(query)}&format=json", caller)
        return [_finding(each, "title", "url", "content") for each in _items(told, "results")]

    def _on_github(self, query: str, caller: Caller) -> list[ResearchFinding]:
        url = f"https://api.github.com/search/repositories?q={quote_plus(query)}&per_page=5"
        items = _items(self._json(url, caller), "items")
        return [_finding(each, "full_name", "html_url", "description") for each in items]

    def _on_pypi(self, query: str, caller: Caller) -> list[ResearchFinding]:
        """Return the project that has the query's name: the interface of indexes has no search."""
        name = normalised("-".join(query.split())[:80])
        url = f"{self._package_index}/{quote(name, safe='')}/"
        files = _items(self._json(url, caller, accept=_PROJECT), "files")
        described = [str(each.get("url")) for each in files if each.get("core-metadata")]
        summary = (
            self._summary(urljoin(url, f"{described[-1]}.metadata"), caller) if described else ""
        )
        return [_finding({"name": name, "url": url, "summary": summary}, "name", "url", "summary")]

    def _summary(self, url: str, caller: Caller) -> str:
        """Return the summary of a package's metadata, "" if it is not to be had."""
        with contextlib.suppress(CellwrightError):
            answer = self._answered(url, caller)
            raw = base64.b64decode(answer.get("body_base64", ""))
            if found := _SUMMARY.search(answer.get("body") or raw.decode("utf-8", "replace")):
                return found[1]
        return ""

    def _json(self, url: str, caller: Caller, accept: str = "application/json") -> Any:
        answer = self._answered(url, caller, Accept=accept)
        if answer["status_code"] != 200:
            raise ToolFailed(f"it answers {answer['status_code']}")
        return answer.get("response_json")

    def _answered(self, url: str, caller: Caller, **headers: str) -> dict[str, Any]:
        if self._request is None:
            raise ToolNotFound("pages cannot be read: no host is allowed")
        return dict(self._request.perform({"url": url, "headers": headers}, caller))

    # documents of this host

    def _local(self, query: str, limit: int) -> list[ResearchFinding]:
        if self._index is None:
            self._index = SearchIndex()
            self._index.add(*(document_of(*each) for each in self._documents()))
        found = self._index.search(query, limit=limit).matches
        return [
            ResearchFinding(
                each.document.name, each.document.id, prose(each.document.description, _SHOWN)
            )
            for each in found
        ]

    def _documents(self) -> list[tuple[str, str, str]]:
        found = [
            (str(path), path.stem, text) for path in self._paths() if (text := self._text_of(path))
        ]
        if self._installed:
            from importlib.metadata import distributions

            for each in distributions():
                name = each.metadata["Name"]
                found.append((f"package {name}", name, each.metadata["Summary"] or ""))
        return found

    def _paths(self) -> list[Path]:
        found: list[Path] = []
        for folder in self._folders:
            for place, folders, names in os.walk(folder):
                folders.sort()
                found += [Path(place, name) for name in sorted(names) if name.endswith(_SUFFIXES)]
                if len(found) >= _MOST_FILES:
                    return found[:_MOST_FILES]
        return found

    def _file(self, path: Path) -> str:
        """Return the text of a file that the folders hold; links are not followed out of them."""
        if path not in self._paths():
            raise ToolNotFound(
                f"there is no document {line(str(path))!r}", "see what search returns"
            )
        return prose(self._text_of(path), _PAGE)

    def _text_of(self, path: Path) -> str:
        """Return the text of a regular file, "" for any other, and for one that cannot be read.

        A directory on the way may become a link meanwhile, so the open file must be in a folder.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
                if not is_regular or not any(map(opened.is_relative_to, self._real_folders)):
                    return ""
                return file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:
            return ""


def _index_of_pip() -> str:
    """Return the address of the index that pip's settings name, without a user and a password, which
    are for the HttpClient; raises PolicyError."""
    parts = urlsplit(settings_of_pip(os.environ).index_url)
    if parts.scheme not in ("http", "https"):
        raise PolicyError(
            "pypi: pip's settings name no index",
            "name one (pip config set global.index-url https://packages.example.org/simple)",
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def _items(told: object, key: str) -> list[Any]:
    items = told.get(key) if isinstance(told, dict) else None
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


def _finding(about: Any, title: str, source: str, text: str) -> ResearchFinding:
    return ResearchFinding(
        line(about.get(title), 200), line(about.get(source)), prose(about.get(text), _SHOWN)
    )


def as_data(found: Sequence[ResearchFinding]) -> list[dict[str, str]]:
    """Return findings as a program gets them."""
    return [each._asdict() for each in found]
