"""Registries of package managers, each with one package, `greeting` 1.0.0, made when it is asked for.

The package has a function that returns WORDS.  Maven's registry also has what Debian packaged of it.
"""

import base64
import hashlib
import io
import json
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cellwright.harness.sandbox.projects.known_programs import known_programs
from tests.projects.stage import Answer, Site

WORDS = "hello from the registry"


def host(start: str) -> str:
    """Return the registry whose name begins so, of those that `cellwright exec` knows."""
    return next(each for each in known_programs().registries.hosts if each.startswith(start))


_NOTHING: Answer = (404, "text/plain", b"not found\n")
_JSON, _BYTES = "application/json", "application/octet-stream"
_DEBIAN = Path("/usr/share/maven-repo")


def _tar(files: Mapping[str, str], mode: int = 0o644) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), mode
            archive.addfile(entry, io.BytesIO(text.encode()))
    return made.getvalue()


def _zip(files: Mapping[str, str | bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return made.getvalue()


def _json(value: object) -> Answer:
    return 200, _JSON, json.dumps(value).encode()


@cache
def _npm_package() -> bytes:
    described = {"name": "greeting", "version": "1.0.0", "main": "index.js"}
    code = f"module.exports = () => '{WORDS}';\n"
    return _tar({"package/package.json": json.dumps(described), "package/index.js": code})


def _npm(name: str, path: str, body: bytes) -> Answer:
    path = path.partition("?")[0]
    if path.endswith(".tgz"):
        return 200, _BYTES, _npm_package()
    if path != "/greeting":
        return _NOTHING
    digest = base64.b64encode(hashlib.sha512(_npm_package()).digest()).decode()
    dist = {
        "tarball": f"https://{name}/greeting/-/greeting-1.0.0.tgz", "integrity": f"sha512-{digest}",
        "shasum": hashlib.sha1(_npm_package()).hexdigest(),
    }  # fmt: skip
    version = {"name": "greeting", "version": "1.0.0", "dist": dist}
    return _json({
        "name": "greeting", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version},
        "time": {"1.0.0": "2020-01-01T00:00:00.000Z"},
    })  # fmt: skip


_WHEEL = "greeting-1.0.0-py3-none-any.whl"


@cache
def _wheel() -> bytes:
    about = "greeting-1.0.0.dist-info"
    return _zip({
        "greeting.py": f"def greet():\n    return '{WORDS}'\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": f"greeting.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n",
    })  # fmt: skip


def _pypi(name: str, path: str, body: bytes) -> Answer:
    url = f"https://{host('files.')}/packages/{_WHEEL}"
    digest = hashlib.sha256(_wheel()).hexdigest()
    if path.startswith("/simple/greeting"):
        file = {"filename": _WHEEL, "url": url, "hashes": {"sha256": digest}}
        listed = {"meta": {"api-version": "1.0"}, "name": "greeting", "files": [file]}
        return 200, "application/vnd.pypi.simple.v1+json", json.dumps(listed).encode()
    if path.startswith("/pypi/greeting/"):
        file = {"filename": _WHEEL, "url": url, "packagetype": "bdist_wheel", "yanked": False}
        file |= {"digests": {"sha256": digest}, "size": len(_wheel())}
        info = {"name": "greeting", "version": "1.0.0", "summary": "", "requires_dist": None}
        info |= {"requires_python": None, "yanked": False}
        return _json({"info": info, "releases": {"1.0.0": [file]}, "urls": [file]})
    return _NOTHING


def _wheels(name: str, path: str, body: bytes) -> Answer:
    return (200, _BYTES, _wheel()) if path == f"/packages/{_WHEEL}" else _NOTHING


@cache
def _crate() -> bytes:
    manifest = '[package]\nname = "greeting"\nversion = "1.0.0"\nedition = "2021"\n'
    code = f'pub fn greet() -> &\'static str {{ "{WORDS}" }}\n'
    return _tar({"greeting-1.0.0/Cargo.toml": manifest, "greeting-1.0.0/src/lib.rs": code})


def _crates(name: str, path: str, body: bytes) -> Answer:
    if path == "/config.json":
        return _json(
            {"dl": f"https://{host('static.')}/crates", "api": f"https://{host('crates')}"}
        )
    if path == "/gr/ee/greeting":
        digest = hashlib.sha256(_crate()).hexdigest()
        line = {"name": "greeting", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
        return _json({**line, "cksum": digest})
    if path == "/crates/greeting/1.0.0/download":
        return 200, _BYTES, _crate()
    return _NOTHING


_GO = "github.com/acme/greeting"


def _go(name: str, path: str, body: bytes) -> Answer:
    module = f"module {_GO}\n"
    code = f'package greeting\n\nfunc Greet() string {{ return "{WORDS}" }}\n'
    inside = f"{_GO}@v1.0.0"
    found = {
        "list": b"v1.0.0\n",
        "v1.0.0.info": b'{"Version": "v1.0.0", "Time": "2020-01-01T00:00:00Z"}',
        "v1.0.0.mod": module.encode(),
        "v1.0.0.zip": _zip({f"{inside}/go.mod": module, f"{inside}/greeting.go": code}),
    }
    start = f"/{_GO}/@v/"
    data = found.get(path.removeprefix(start)) if path.startswith(start) else None
    return _NOTHING if data is None else (200, _BYTES, data)


@cache
def _jar() -> bytes:
    code = f'package acme; public class Greeting {{ public static String greet() {{ return "{WORDS}"; }} }}'
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "Greeting.java")
        source.write_text(code)
        subprocess.run(
            ["javac", "--release", "8", "-nowarn", "-d", directory, str(source)],
            check=True,
            capture_output=True,
        )
        return _zip({"acme/Greeting.class": Path(directory, "acme/Greeting.class").read_bytes()})


def _maven(name: str, path: str, body: bytes) -> Answer:
    if path.endswith(".sha1"):
        status, kind, data = _maven(name, path.removesuffix(".sha1"), body)
        digest = hashlib.sha1(data).hexdigest().encode()
        return (200, kind, digest) if status == 200 else _NOTHING
    path = path.removeprefix("/maven2/").removeprefix("/m2/")
    if path == "acme/greeting/1.0.0/greeting-1.0.0.jar":
        return 200, _BYTES, _jar()
    if path == "acme/greeting/1.0.0/greeting-1.0.0.pom":
        names = "<groupId>acme</groupId><artifactId>greeting</artifactId><version>1.0.0</version>"
        return (
            200,
            "text/xml",
            f"<project><modelVersion>4.0.0</modelVersion>{names}</project>".encode(),
        )
    file = _DEBIAN / path
    return (200, _BYTES, file.read_bytes()) if ".." not in path and file.is_file() else _NOTHING


@cache
def _gem() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "greeting.rb").write_text(f"def greet\n  '{WORDS}'\nend\n")
        Path(directory, "greeting.gemspec").write_text(
            "Gem::Specification.new { |s| s.name = 'greeting'; s.version = '1.0.0'; s.summary = 'x'; "
            "s.authors = ['x']; s.files = ['greeting.rb']; s.require_path = '.' }\n"
        )
        subprocess.run(
            ["gem", "build", "-q", "greeting.gemspec"],
            cwd=directory,
            check=True,
            capture_output=True,
        )
        return Path(directory, "greeting-1.0.0.gem").read_bytes()


def _gems(name: str, path: str, body: bytes) -> Answer:
    info = f"---\n1.0.0 |checksum:{hashlib.sha256(_gem()).hexdigest()}\n"
    if path == "/versions":
        digest = hashlib.md5(info.encode()).hexdigest()
        listing = f"created_at: 2020-01-01T00:00:00Z\n---\ngreeting 1.0.0 {digest}\n"
        return 200, "text/plain", listing.encode()
    if path == "/info/greeting":
        return 200, "text/plain", info.encode()
    return (200, _BYTES, _gem()) if path == "/gems/greeting-1.0.0.gem" else _NOTHING


def _packagist(name: str, path: str, body: bytes) -> Answer:
    if path == "/packages.json":
        return _json({"packages": [], "metadata-url": "/p2/%package%.json"})
    if path != "/p2/acme/greeting.json":
        return _NOTHING
    dist = {"type": "zip", "url": "https://codeload.github.com/acme/greeting/php.zip"}
    version = {"name": "acme/greeting", "version": "1.0.0", "version_normalized": "1.0.0.0"}
    autoload = {"files": ["greeting.php"]}
    return _json({"packages": {"acme/greeting": [{**version, "dist": dist, "autoload": autoload}]}})


def _codeload(name: str, path: str, body: bytes) -> Answer:
    """Answer with archives of sources: of PHP, and of C, with build files for meson and CMake."""
    if path == "/acme/greeting/php.zip":
        code = f"<?php\nfunction greet() {{ return '{WORDS}'; }}\n"
        return (
            200,
            _BYTES,
            _zip({"g/composer.json": '{"name": "acme/greeting"}', "g/greeting.php": code}),
        )
    if path == "/acme/greeting/c.tar.gz":
        return 200, _BYTES, c_archive()
    return _NOTHING


@cache
def c_archive() -> bytes:
    return _tar({
        "greeting-1.0.0/greeting.h": f'static inline const char *greet(void) {{ return "{WORDS}"; }}\n',
        "greeting-1.0.0/meson.build": "project('greeting', 'c')\n"
        "greeting_dep = declare_dependency(include_directories: include_directories('.'))\n",
        "greeting-1.0.0/CMakeLists.txt": "cmake_minimum_required(VERSION 3.18)\nproject(greeting C)\n"
        "add_library(greeting INTERFACE)\ntarget_include_directories(greeting INTERFACE .)\n",
    })  # fmt: skip


@cache
def _repository() -> Mapping[str, bytes]:
    """Return the files of a bare repository of an Elixir library, for git over plain files."""
    with tempfile.TemporaryDirectory() as directory:
        work, bare = Path(directory, "work"), Path(directory, "bare")
        (work / "lib").mkdir(parents=True)
        (work / "lib/greeting.ex").write_text(
            f'defmodule Greeting do\n  def greet, do: "{WORDS}"\nend\n'
        )
        (work / "mix.exs").write_text(
            "defmodule Greeting.MixProject do\n  use Mix.Project\n"
            '  def project, do: [app: :greeting, version: "1.0.0", deps: []]\nend\n'
        )
        own = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
        for command in (
            [*own, "init", "-q", "-b", "main", "."], [*own, "add", "."], [*own, "commit", "-qm", "x"],
            ["git", "clone", "-q", "--bare", ".", str(bare)],
            ["git", "--git-dir", str(bare), "update-server-info"],
        ):  # fmt: skip
            subprocess.run(command, cwd=work, check=True, capture_output=True)
        return {
            str(each.relative_to(bare)): each.read_bytes()
            for each in bare.rglob("*")
            if each.is_file()
        }


def _git(name: str, path: str, body: bytes) -> Answer:
    path = path.partition("?")[0]
    file = _repository().get(path.removeprefix("/acme/greeting.git/"))
    return _NOTHING if file is None else (200, _BYTES, file)


_STARTS: Mapping[str, Site] = {
    "registry.npm": _npm, "registry.yarn": _npm, "pypi": _pypi, "files.": _wheels,
    "index.crates": _crates, "static.crates": _crates, "proxy.golang": _go, "repo.maven": _maven,
    "repo1.maven": _maven, "plugins.": _maven, "rubygems": _gems, "index.rubygems": _gems,
    "repo.packagist": _packagist, "codeload": _codeload, "github.com": _git,
}  # fmt: skip
SITES: Mapping[str, Site] = {host(start): site for start, site in _STARTS.items()}
