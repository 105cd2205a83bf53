"""Research of an agent: documents of the host, and pages as far as rules allow."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cellwright import NetworkRule, PolicyError, Sandbox
from cellwright.agent import Research
from cellwright.errors import ToolNotFound
from cellwright.policies.errors import ToolError
from cellwright.tools import HttpClient
from tests.conftest import policy_named

HTML = (
    "<html><head><title>t</title></head><body><h1>Validate</h1><script>steal()</script>"
    "<p>Use <b>email-validator</b> &amp; more</p></body></html>"
)


@contextmanager
def site(pages: dict[str, tuple[str, str]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = pages.get(self.path, ("", ""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def client(url: str) -> HttpClient:
    port = int(url.rpartition(":")[2])
    rule = NetworkRule(host="localhost", ports=(port,), schemes=("http",))
    return HttpClient([rule], addresses=["127.0.0.0/8", "::1/128"])


def test_documents_of_a_folder_are_found_and_read(tmp_path: Path) -> None:
    (tmp_path / "mail.md").write_text("# Mail\nHow to validate an e-mail address.\n")
    (tmp_path / "other.txt").write_text("Bread is baked.")
    (tmp_path / "secret.key").write_text("validate e-mail")
    (tmp_path / "link.md").symlink_to("/etc/passwd")
    research = Research(folders=[tmp_path])
    (found,) = research.search("validate e-mail addresses")
    assert found.source == str(tmp_path / "mail.md")
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert "How to validate" in research.read(found.source, sandbox)
        assert research.read(str(tmp_path / "link.md"), sandbox) == ""
        for outside in ("/etc/passwd", str(tmp_path / ".." / "x.md"), str(tmp_path / "secret.key")):
            with pytest.raises(ToolNotFound):
                research.read(outside, sandbox)


def test_a_directory_that_becomes_a_link_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, elsewhere = tmp_path / "documents", tmp_path / "elsewhere"
    for folder in (documents / "sub", elsewhere):
        folder.mkdir(parents=True)
        (folder / "a.md").write_text(f"text of {folder.name}")
    research = Research(folders=[documents])
    listed = Research._paths

    def swapped(self: Research) -> list[Path]:
        found = listed(self)
        (documents / "sub").rename(documents / "old")
        (documents / "sub").symlink_to(elsewhere)
        return found

    path = str(documents / "sub" / "a.md")
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        assert research.read(path, sandbox) == "text of sub"
        monkeypatch.setattr(Research, "_paths", swapped)
        assert research.read(path, sandbox) == ""


def test_installed_packages_are_found_by_their_summaries() -> None:
    found = Research(installed=True).search("fast serialization and validation library")
    assert "package msgspec" in [each.source for each in found]


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="folders: not a directory"):
        Research(folders=[tmp_path / "missing"])


def test_without_a_client_no_page_is_read() -> None:
    with Sandbox(policy=policy_named("strict"), pool=0) as sandbox, pytest.raises(ToolNotFound):
        Research().read("http://localhost/", sandbox)
    with pytest.raises(PolicyError, match="http"):
        Research(pypi=True)


def test_the_index_that_pips_settings_name_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [{"url": "thing-1.0.whl"}, {"url": "../files/thing-2.0.whl", "core-metadata": True}]
    pages = {
        "/simple/my-thing/": (
            "application/vnd.pypi.simple.v1+json",
            json.dumps({"name": "my-thing", "files": files}),
        ),
        "/simple/files/thing-2.0.whl.metadata": (
            "application/octet-stream", "Name: my-thing\nSummary: Does\u202e things\n",
        ),
    }  # fmt: skip
    with site(pages) as url:
        with pytest.raises(PolicyError, match="pip's settings name no index"):
            Research(client(url), pypi=True)
        with_password = url.replace("//", "//user:secret@")
        monkeypatch.setenv("PIP_INDEX_URL", f"{with_password}/simple/")
        research = Research(client(url), pypi=True)
        (found,) = research.search("My_Thing")
        assert found == ("my-thing", f"{url}/simple/my-thing/", "Does things")
        assert [each.title for each in research.search("nothing")] == ["not available"]


def test_a_search_engine_is_asked_and_a_page_becomes_text_in_a_cell() -> None:
    results = {"results": [{"title": "Valid\u202e", "url": "http://x/", "content": "c"}, 7]}
    pages = {
        "/search?q=e+mail&format=json": ("application/json", json.dumps(results)),
        "/page": ("text/html; charset=utf-8", HTML),
    }
    with site(pages) as url, Sandbox(policy=policy_named("strict"), pool=0) as sandbox:
        research = Research(client(url), search_url=f"{url}/search")
        (found,) = research.search("e mail")
        assert (found.title, found.source, found.text) == ("Valid", "http://x/", "c")
        text = research.read(f"{url}/page", sandbox)
        assert text == "Validate\nUse email-validator & more"
        with pytest.raises(ToolError):
            research.read("http://localhost:1/", sandbox)  # no rule allows it


def test_a_source_that_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "mail.md").write_text("Validate an e-mail address.")
    with site({}) as url:
        research = Research(client(url), search_url=f"{url}/search", folders=[tmp_path])
        found = research.search("validate e-mail address")
    assert [each.title for each in found] == ["mail", "not available"]
    assert "404" in found[1].text
