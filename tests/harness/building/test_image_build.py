"""Builds from a tree of busybox: what the cells of an image see of what its Dockerfile says."""

import os
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import PolicyError, Sandbox
from cellwright.errors import BuildFailed
from cellwright.harness.sandbox.building.image_build import build_image, build_policy
from cellwright.harness.sandbox.images.image import StoredImage
from cellwright.harness.sandbox.images.image_store import ImageStore
from cellwright.policies.network.rule import NetworkRule
from tests.escapes.image_cells import make_root

pytestmark = [pytest.mark.needs("busybox"), pytest.mark.needs("root"), pytest.mark.needs("cgroup")]
Build = Callable[..., StoredImage]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    """A store with the image base:1, in which /sbin is a link to /bin."""
    root = make_root(tmp_path_factory.mktemp("root"))
    (root / "sbin").symlink_to("bin")
    (root / "home/joe").chmod(0o700)
    made = ImageStore(tmp_path_factory.mktemp("store") / "images")
    made.import_(root, "base:1")
    return made


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "context").mkdir()
    return tmp_path / "context"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def build(store: ImageStore, context: Path, said: list[str]) -> Build:
    def made(text: str, **options: object) -> StoredImage:
        (context / "Dockerfile").write_text(text)
        said.clear()
        return build_image(context, store=store, on_progress=said.append, **options)  # type: ignore[arg-type]

    return made


def sh(image: StoredImage, line: str) -> str:
    with Sandbox(image=image, pool=0) as sandbox:
        done = sandbox.run(["/bin/sh", "-c", line], user="0", cwd="/")
    return (done.stdout + done.stderr).strip()


def cached(said: list[str]) -> int:
    return sum(each.endswith("cached") for each in said)


def test_instructions_make_the_files_and_the_configuration(build: Build, context: Path) -> None:
    (context / "app/sub").mkdir(parents=True)
    (context / "app/one").write_text("1")
    (context / "app/sub/tool").write_text("#!/bin/sh\necho tool\n")
    (context / "app/sub/tool").chmod(0o755)
    image = build(
        "FROM base:1\nARG WHO=world\nENV GREETING=hello\n"
        "WORKDIR /srv/app\n"
        "COPY app .\nCOPY app/sub/tool /sbin/\n"
        "RUN echo $GREETING $WHO > said; pwd > where; id -u > as\n"
        "USER joe\nWORKDIR sub2\n"
        "RUN echo $HOME > where; id -u > as\n"
        'COPY --chown=joe:mail --chmod=640 app/one "/home/joe/kept"\n'
        "EXPOSE 80\nLABEL a=b\nCMD tool\n",
        name="made:1",
    )
    told = sh(image, "cd /srv/app; cat said where as sub2/where sub2/as")
    assert told == "hello world\n/srv/app\n0\n/home/joe\n1000"
    assert sh(image, "tool; cat /srv/app/one; readlink /sbin") == "tool\n1bin"
    lines = sh(image, "stat -c '%a %u %g' /home/joe /home/joe/kept /srv/app/sub2 /srv/app/sub/tool")
    assert lines == "700 1000 1000\n640 1000 8\n755 1000 1000\n755 0 0"
    config = image.config
    assert (config.user, config.working_dir) == ("joe", "/srv/app/sub2")
    assert (config.cmd, config.exposed_ports) == (("/bin/sh", "-c", "tool"), ("80/tcp",))
    assert "GREETING=hello" in config.env
    assert not [each for each in config.env if each.startswith("WHO")]
    assert image.names == ("made:1",)


def test_a_build_again_takes_all_steps_from_the_cache(
    build: Build, context: Path, said: list[str]
) -> None:
    (context / "file").write_text("first")
    (context / "other").write_text("x")
    text = "FROM base:1\nRUN echo cache > /a\nCOPY file /file\nRUN cat /file > /b\nENV x=$Y\n"
    first = build(text)
    assert cached(said) == 0
    os.utime(context / "file", (1, 1))
    (context / "other").write_text("y")
    assert build(text) == first
    assert cached(said) == 3
    build(text.replace("ENV x", "LABEL y=z\nENV x"))
    assert cached(said) == 3
    (context / "file").write_text("second")
    second = build(text)
    assert cached(said) == 1
    assert (second == first, sh(second, "cat /b")) == (False, "second")
    (context / "file").chmod(0o755)
    build(text)
    assert cached(said) == 1


def test_the_key_of_a_step_has_what_its_command_sees(build: Build, said: list[str]) -> None:
    text = "FROM base:1\nARG A=1\nENV B=2\nUSER joe\nRUN echo key $A $B\n"
    build(text)
    for other, options in (
        (text, {"args": {"A": "3"}}),
        (text.replace("B=2", "B=4"), {}),
        (text.replace("USER joe", "USER mail"), {}),
        (text.replace("USER joe", "USER joe\nWORKDIR /tmp"), {}),
        (text.replace("USER joe", 'USER joe\nSHELL ["/bin/sh", "-ec"]'), {}),
        (text, {"policy": _allowing(1, "127.0.0.1/32")}),
        (text, {"use_cache": False}),
    ):
        build(other, **options)
        assert not [each for each in said if "RUN" not in each and each.endswith("5 cached")]
        assert not cached(said)
    build(text)
    assert cached(said) == 1


def test_stages_are_made_when_they_are_needed(build: Build, said: list[str]) -> None:
    text = (
        "ARG BASE=base\nFROM ${BASE}:1 AS one\nRUN mkdir /out; echo 1 > /out/a; ln -s a /out/link; "
        "chown 8:8 /out/a; chmod 600 /out/a\n"
        "FROM base:1 AS unneeded\nRUN exit 1\n"
        "FROM one AS two\nRUN echo 2 > /out/b\n"
        "FROM scratch\nCOPY --from=two /out/ /bin/\nCOPY --from=0 /out/* /one/\n"
        "COPY --from=base:1 /bin/busybox /bin/sh\n"
    )
    image = build(text)
    with Sandbox(image=image, pool=0) as sandbox:
        found = sandbox.execute(
            "import os; [(p, os.lstat(p).st_uid, oct(os.lstat(p).st_mode)) for p in "
            "('/bin/a', '/bin/b', '/bin/link', '/one/a', '/one/link', '/bin/sh')], os.readlink('/bin/link')"
        )
        assert found.value == [
            [
                ["/bin/a", 0, "0o100600"], ["/bin/b", 0, "0o100644"], ["/bin/link", 0, "0o120777"],
                ["/one/a", 0, "0o100600"],
                ["/one/link", 0, "0o100600"], ["/bin/sh", 0, "0o100755"],
            ],
            "a",
        ]  # fmt: skip
    assert len(image.layers) == 3
    assert build(text).digest == image.digest
    assert sh(build(text, target="one"), "ls /out") == "a\nlink"
    with pytest.raises(PolicyError, match="no stage 'three'"):
        build(text, target="three")


def test_a_dockerignore_leaves_files_out(build: Build, context: Path, said: list[str]) -> None:
    for name in ("keep/a", "keep/b.log", "deep/x/y/kept", "deep/x/out", "secret", "empty/z"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(name)
    (context / ".dockerignore").write_text(
        "*\n!keep\n**/*.log\n!deep/x/y/kept\nDockerfile\n.dockerignore\n"
    )
    text = "FROM base:1\nCOPY . /all/\n"
    image = build(text)
    assert sh(image, "cd /all; find . | sort") == (
        ".\n./deep\n./deep/x\n./deep/x/y\n./deep/x/y/kept\n./keep\n./keep/a"
    )
    (context / "secret").write_text("another")
    assert build(text) == image
    with pytest.raises(PolicyError, match="Dockerfile:2: 'secret' is left out by .dockerignore"):
        build("FROM base:1\nCOPY secret /\n")


def test_here_documents_are_scripts_and_files(build: Build) -> None:
    image = build(
        "FROM base:1\nARG X=5\nRUN <<EOF\necho $X > /one\necho b >> /one\nEOF\n"
        "RUN <<EOF\n#!/bin/cat\nnot run\nEOF\n"
        "RUN cat <<A - <<'B' > /two\n$X\nA\n$X\nB\n"
        "COPY --chmod=600 <<a.txt <<'b.txt' /files/\n'$X'\na.txt\n'$X'\nb.txt\n"
    )
    assert sh(image, "cat /one /two /files/a.txt /files/b.txt") == "5\nb\n$X\n'5'\n'$X'"
    assert sh(image, "stat -c %a /files/a.txt") == "600"


def test_add_unpacks_a_tar_and_copies_other_files(build: Build, context: Path) -> None:
    def of_joe(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid = 1000, 8
        return member

    (context / "file").write_text("content")
    for mode in ("gz", "xz"):
        with tarfile.open(context / f"a.tar.{mode}", f"w:{mode}") as archive:  # type: ignore[call-overload]
            archive.add(context / "file", "sub/file", filter=of_joe)
    image = build("FROM base:1\nADD a.tar.gz /a\nADD a.tar.xz /sbin/x/\nADD file /a/plain\n")
    assert sh(image, "cat /a/sub/file /bin/x/sub/file /a/plain; stat -c '%u %g' /a/sub/file") == (
        "contentcontentcontent1000 8"
    )
    image = build("FROM scratch\nADD a.tar.gz /\nCOPY --from=base:1 /bin /bin\n")
    assert sh(image, "cat /sub/file") == "content"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM base:1\n\nCOPY out /x", "Dockerfile:3: 'out' leads out of the context"),
        (
            "FROM base:1\nCOPY below/passwd /x",
            "Dockerfile:2: 'below/passwd' leads out of the context",
        ),
        ("FROM base:1\nCOPY ../../../etc/passwd /x", "'etc/passwd' is not in the context"),
        ("FROM base:1\nCOPY pipe /x", "'pipe' is neither a file nor a directory"),
        ("FROM base:1\nCOPY absent /x", "'absent' is not in the context"),
        ("FROM base:1\nCOPY tree /bin/sh", "/bin/busybox is a file in the image"),
        ("FROM base:1\nCOPY tree /", "/sbin is a link in the image"),
        ("FROM base:1\nCOPY a /bin/sh/", "/bin/busybox is a file in the image"),
        ("FROM base:1\nCOPY a /dev/x", "/dev/x belongs to cells"),
        ("FROM base:1\nWORKDIR /workspace", "/workspace belongs to cells"),
        ("FROM base:1\nRUN echo > /workspace/x", "Dockerfile:2: it wrote /workspace/x"),
        ("FROM base:1\nCOPY --chown=none a /x", "/etc/passwd has no none"),
        ("FROM base:1\nCOPY --chmod=u+x a /x", "must be an octal mode"),
        ("FROM base:1\nCOPY --from=base:1 /absent /x", "/absent does not exist"),
        ("FROM absent:1", "Dockerfile:1: image: 'absent:1' is not in the store"),
        ("FROM /etc", "Dockerfile:1: image: invalid name '/etc'"),
        ("FROM ./tree", "Dockerfile:1: image: invalid name './tree'"),
        ("FROM --platform=linux/none base:1", "Dockerfile:1: FROM: --platform must be linux/"),
        ("FROM scratch\nUSER a", "the stage has no files"),
        ("FROM scratch\nRUN a", "Dockerfile:2: RUN: the stage has no files"),
        ("FROM base:1\nUSER ${a", "Dockerfile:2: bad substitution"),
        ("FROM base:1\nCOPY a[ /x", "a closing ] is missing"),
    ],
)
def test_an_error_names_its_line(
    build: Build, context: Path, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/passwd").write_text("secret")
    (context / "out").symlink_to("../outside/passwd")
    (context / "below").symlink_to(tmp_path / "outside")
    (context / "tree/sbin").mkdir(parents=True)
    (context / "a").write_text("")
    os.mkfifo(context / "pipe")
    with pytest.raises(PolicyError) as raised:
        build(f"{text}\n")
    assert words in str(raised.value)


def test_links_and_pipes_below_a_directory_of_the_context(build: Build, context: Path) -> None:
    (context / "d").mkdir()
    (context / "d/link").symlink_to("/etc/shadow")
    (context / "in").symlink_to("d/file")
    (context / "d/file").write_text("inside")
    os.mkfifo(context / "d/pipe")
    image = build("FROM base:1\nCOPY d /d\nCOPY in /in\n")
    assert sh(image, "ls /d; readlink /d/link; cat /in") == "file\nlink\n/etc/shadow\ninside"


def test_a_context_is_bounded(store: ImageStore, context: Path) -> None:
    with open(context / "huge", "wb") as file:
        file.truncate(1 << 40)
    (context / "Dockerfile").write_text("FROM base:1\nCOPY huge /\n")
    with pytest.raises(PolicyError, match="Dockerfile:2: more than 17179869184 bytes"):
        build_image(context, store=store)


def test_a_command_that_fails_ends_the_build(build: Build, said: list[str]) -> None:
    with pytest.raises(BuildFailed, match="Dockerfile:3: RUN failed with exit status 3") as raised:
        build("FROM base:1\n\nRUN echo before; echo why >&2; exit 3\nRUN touch /never\n")
    assert (raised.value.line, raised.value.exited) == (3, 3)
    assert raised.value.output == "before\nwhy"
    assert "  | why" in said


def _allowing(port: int, *networks: str) -> object:
    policy = build_policy(None)
    rule = NetworkRule(host="localhost", ports=(port,), schemes=("tcp",), addresses=networks)
    return replace(policy, network=replace(policy.network, allow=(rule,)))


@pytest.fixture
def port() -> Iterator[int]:
    """A server on the host's loopback that sends one word to each client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"served\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_command_reaches_only_what_the_policy_allows(build: Build, port: int) -> None:
    text = f"FROM base:1\nRUN nc localhost {port} < /dev/null > /got; grep served /got\n"
    with pytest.raises(BuildFailed, match="exit status 1"):
        build(text)
    image = build(text, policy=_allowing(port, "127.0.0.1/32"))
    assert sh(image, "cat /got") == "served"


def test_images_of_steps_are_removed_by_prune(
    store: ImageStore, build: Build, said: list[str]
) -> None:
    text = "FROM base:1\nENV a=b\nRUN echo pruned > /a\nRUN echo > /b\n"
    build(text, name="kept:1")
    layers = set(store.find("kept:1").layers)
    assert store.prune()
    assert {each for found in store.list() for each in found.layers} >= layers
    there = {each.digest for each in store.list()}
    assert {each.read_text() for each in store.builds.iterdir()} <= there
    build(text)
    assert not cached(said)


def test_times_are_those_of_the_epoch(
    build: Build, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context / "file").write_text("x")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    text = "FROM base:1\nCOPY . /new/\nENV a=b\n"
    image = build(text)
    assert image.created == "2001-09-09T01:46:40Z"
    assert sh(image, "stat -c %Y /new/file /new") == "1000000000\n1000000000"
    os.utime(context / "file")
    assert build(text, use_cache=False).digest == image.digest
