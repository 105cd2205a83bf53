"""Cells with an image as their root, asked by programs of busybox inside."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cellwright import PolicyError, Sandbox, SessionSettings
from cellwright.harness.sandbox.containers import image_cells
from cellwright.harness.sandbox.images.image import ImageConfig, StoredImage
from cellwright.harness.sandbox.images.image_store import ImageStore
from cellwright.policies.profiles.loading import policy_of_data
from cellwright.runner.host.image_ids import ImageIds, find_image_ids, one_id
from cellwright.testing import inspect
from tests.conftest import policy_named, soon, with_limits
from tests.escapes.image_cells import make_root

pytestmark = pytest.mark.needs("busybox", "root", "cgroup", "image")
CAPABILITIES = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 31


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of busybox, with two users, and a file of one of them."""
    root = make_root(tmp_path_factory.mktemp("root") / "files")
    (root / "bin/rootly").write_bytes((root / "bin/busybox").read_bytes()[:0])
    (root / "bin/rootly").chmod(0o4755)
    return root


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("store") / "images")


@pytest.fixture(scope="module")
def image(store: ImageStore, files: Path) -> StoredImage:
    return store.import_(files)


@pytest.fixture(scope="module")
def sandbox(image: StoredImage) -> Iterator[Sandbox]:
    with Sandbox(image=image, pool=1) as box:
        yield box


def test_workers_make_cells_of_an_image(image: StoredImage) -> None:
    with Sandbox(image=image, pool=1, workers=2) as box:
        assert sh(box, "id -u; cat /usr/share/notes; pwd") == "0\nof the image\n/"
        assert sh(box, "whoami; echo no > /etc/passwd", user="joe").startswith("joe\n")
        with box.session() as session:
            session.run("touch /mine", shell=True)
            assert session.run("ls /mine", shell=True).stdout == "/mine\n"
            with pytest.raises(PolicyError, match="commit"):
                session.commit()
        with box.program(["cat", "/usr/share/notes"], user="joe") as program:
            assert os.read(program.stdout, 100) == b"of the image\n"


def sh(sandbox: Sandbox, line: str, **options: str) -> str:
    done = sandbox.run(line, shell=True, **options)  # type: ignore[arg-type]
    return (done.stdout + done.stderr).strip()


def test_programs_are_the_images_and_root_of_its_ids(sandbox: Sandbox) -> None:
    assert "image_root" in sandbox.layers
    assert sh(sandbox, "id -u; cat /usr/share/notes; pwd") == "0\nof the image\n/"
    assert sandbox.execute("import os; (os.getuid(), sorted(os.listdir('/home')))").value == [
        0,
        ["joe"],
    ]
    assert sh(sandbox, "stat -c '%u %g' /home/joe /bin/busybox") == "1000 1000\n0 0"


def test_files_change_owners_and_programs_change_ids(sandbox: Sandbox) -> None:
    assert sh(sandbox, "touch /x && chown 1000:8 /x && stat -c '%u %g' /x") == "1000 8"
    assert sh(sandbox, "chown 8 /usr/share/notes && stat -c '%u' /usr/share/notes") == "8"
    assert sh(sandbox, "su joe -c 'id; touch ~/mine; echo no > /etc/passwd'") == (
        "uid=1000(joe) gid=1000(joe) groups=29(audio),1000(joe)\n"
        "sh: can't create /etc/passwd: Permission denied"
    )


def test_no_cell_sees_the_changes_of_another(sandbox: Sandbox) -> None:
    assert (
        sh(sandbox, "rm -r /usr/share /etc/group; touch /etc/new; ls /usr; ls /etc/new")
        == "/etc/new"
    )
    assert sh(sandbox, "cat /usr/share/notes; ls /etc/new").startswith("of the image\nls: /etc/new")


def test_a_session_keeps_its_changes(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run(
            "rm /usr/share/notes; mkdir /opt; echo 1 > /opt/one; mv /home /house", shell=True
        )
        told = session.run("ls /usr/share /house; cat /opt/one", shell=True)
        assert told.stdout == "/house:\njoe\n\n/usr/share:\n1\n"
    with sandbox.session(language="sh") as shell:
        shell.execute("name=kept; touch /kept")
        assert shell.execute("echo $name; ls /kept").stdout == "kept\n/kept\n"


def test_capabilities_are_those_over_files_and_ids(sandbox: Sandbox) -> None:
    told = dict(
        line.split(":\t")
        for line in sh(sandbox, "cat /proc/self/status").splitlines()
        if ":\t" in line
    )
    for name in ("CapPrm", "CapEff", "CapBnd"):
        assert int(told[name], 16) == CAPABILITIES
    for name in ("CapInh", "CapAmb"):
        assert int(told[name], 16) == 0
    assert (told["NoNewPrivs"], told["Seccomp"]) == ("1", "2")
    of_joe = sh(sandbox, "grep -E 'CapPrm|CapEff' /proc/self/status", user="joe")
    assert {int(line.split()[1], 16) for line in of_joe.splitlines()} == {0}


@pytest.mark.parametrize(
    "line",
    [
        "mount -t tmpfs none /tmp", "mknod /dev/sda b 8 0", "mknod /tmp/null c 1 3", "hostname other",
        "chroot /home /bin/sh", "mount -o remount,suid /", "echo 0 > /proc/sys/vm/overcommit_memory",
    ],
)  # fmt: skip
def test_root_of_an_image_cannot_do_what_root_of_the_host_can(sandbox: Sandbox, line: str) -> None:
    done = sandbox.run(line, shell=True)
    assert done.exit_code
    assert any(
        words in done.stderr for words in ("not permitted", "Read-only", "denied", "nonexistent")
    ), done.stderr


def test_a_cells_processes_have_ids_that_no_user_has(sandbox: Sandbox) -> None:
    ids = find_image_ids()
    with sandbox.session() as session:
        told = session.start_command(["id", "-u"], user="joe")
        assert (told.wait(60), told.read()) == (0, b"1000\n")
        started = session.start_command(["sleep", "60"], user="joe")
        (cell,) = inspect(sandbox).cell_pids()[-1:]
        assert soon(
            lambda: "sleep" in Path(f"/proc/{cell}/task/{cell}/children").read_text() or True
        )
        children = Path(f"/proc/{cell}/task/{cell}/children").read_text().split()
        owners = {os.stat(f"/proc/{pid}").st_uid for pid in (str(cell), *children)}
        assert {ids.root[0], ids.root[0] + 1000} <= owners | {ids.root[0] + 1000}
        assert all(ids.root[0] <= each < ids.root[0] + 65536 for each in owners)
        started.kill()


def test_users_directories_and_variables_are_those_of_the_call_or_of_the_image(
    store: ImageStore, image: StoredImage
) -> None:
    config = ImageConfig(
        env=("GREETING=hello", "PATH=/bin"), working_dir="/usr/share", user="joe:audio",
        entrypoint=("/bin/sh", "-c"), cmd=("id -u; pwd",),
    )  # fmt: skip
    with Sandbox(image=replace(image, config=config)) as sandbox:
        assert sh(sandbox, "id -u; id -g; pwd; echo $GREETING $HOME") == (
            "1000\n29\n/usr/share\nhello /home/joe"
        )
        assert sh(sandbox, "id -u; pwd", user="0", cwd="/home") == "0\n/home"
        assert sh(sandbox, "id", user="8") == "uid=8(mail) gid=8(mail) groups=8(mail),29(audio)"
        assert sh(sandbox, "id -u", user="4711") == "4711"
        for unknown in ("²", "99999999999999999999"):
            assert sandbox.run(["id"], user=unknown).stderr.startswith("user: ")
        assert sandbox.run(["id"], user="nobody").stderr == "user: /etc/passwd has no nobody\n"
        assert sandbox.run(["absent"], user="8").exit_code == 127
        with sandbox.program() as program, open(os.dup(program.stdout), "rb") as output:
            assert output.read() == b"1000\n/usr/share\n"


def test_a_port_below_1024_is_open_to_every_user_of_the_image(sandbox: Sandbox) -> None:
    line = (
        "while :; do echo hi | nc -l -p 80 2> /dev/null; done & "  # a client may end before it reads
        "until nc 127.0.0.1 80 < /dev/null 2> /dev/null | grep hi; do :; done"
    )
    assert sh(sandbox, line, user="joe").startswith("hi")


def test_changes_are_limited(image: StoredImage) -> None:
    policy = with_limits(policy_named("workshop"), workspace_bytes=8 << 20)
    with Sandbox(image=image, policy=policy) as sandbox:
        done = sandbox.run(["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=20"])
        assert "No space left" in done.stderr
        size = sandbox.run(["stat", "-c", "%s", "/bin/busybox"])
        assert int(size.stdout) > 1 << 19


LINKS = {
    "proc": "/etc", "workspace": "/", "dev": "etc", "sys": "/proc", ".cellwright": "/bin",
    "etc/resolv.conf": "/../../../etc/shadow", "etc/hosts": "/proc/1/root/etc/passwd",
}  # fmt: skip


def test_links_of_an_image_lead_nowhere_outside(
    store: ImageStore, files: Path, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile"
    shutil.copytree(files, hostile, symlinks=True)
    for place, target in LINKS.items():
        (hostile / place).symlink_to(target)
    with Sandbox(image=store.import_(hostile)) as sandbox:
        for place in ("proc", "workspace", "dev", "sys", ".cellwright", "etc/hosts"):
            assert sh(sandbox, f"readlink /{place}") == ""
        assert sh(sandbox, "cat /etc/hosts").startswith("127.0.0.1 localhost")
        assert "No such file" in sh(sandbox, "cat /etc/resolv.conf")
        done = sandbox.execute("open('out', 'w').write('x')", collect=["out"])
        assert [each.path for each in done.files] == ["out"]


def test_with_one_id_calls_for_others_succeed_in_appearance(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single: ImageIds = one_id(find_image_ids().root[0])
    monkeypatch.setattr(image_cells, "find_image_ids", lambda: single)
    image = ImageStore(tmp_path / "images", ids=single).import_(files)
    with Sandbox(image=image) as sandbox:
        assert sh(sandbox, "id -u; touch /x; chown 1000:8 /x && stat -c '%u %g' /x") == "0\n0 0"
        assert sh(sandbox, "su joe -c 'id -u'") == "0"
        assert sh(sandbox, "cat /proc/self/uid_map").split()[0::2] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"policy": "strict"}, "needs processes.subprocesses"),
        ({"sessions": SessionSettings(pause_seconds=60.0)}, "cannot be combined with an image"),
        ({"image": "absent:1"}, "not in the store"),
    ],
)
def test_arguments_that_an_image_excludes_are_named(
    image: StoredImage, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(PolicyError, match=words):
        Sandbox(**{"image": image, **arguments})  # type: ignore[arg-type]


def test_commands_without_an_image_have_no_user() -> None:
    with Sandbox(policy="standard", pool=0) as sandbox:
        with pytest.raises(PolicyError, match="user: needs an image"):
            sandbox.run(["true"], user="root")
        with pytest.raises(PolicyError, match="user: needs an image"):
            sandbox.program(["true"], user="root")


def test_a_branch_repeats_the_calls_and_a_pause_is_refused(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.execute("open('/made', 'w').write('once')")
        (branch,) = session.branch()
        with branch:
            assert branch.execute("open('/made').read()").value == "once"
        with pytest.raises(PolicyError, match="pause: what the session has changed"):
            session.pause()


def test_set_user_id_programs_of_the_image_give_nothing(
    sandbox: Sandbox, image: StoredImage
) -> None:
    (layer,) = image.layers
    assert os.stat(Path(layer, "bin/rootly")).st_mode & stat.S_ISUID
    line = "chmod 4755 /bin/busybox; su joe -c 'id -u; grep CapEff /proc/self/status'"
    assert sh(sandbox, line) == "1000\nCapEff:\t0000000000000000"


def test_a_policy_still_shows_paths_of_the_host_beside_the_image(
    image: StoredImage, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("of the host")
    tmp_path.chmod(0o755)
    policy = policy_of_data({"extends": "workshop", "filesystem": {"read": [str(tmp_path)]}})
    with Sandbox(image=image, policy=policy) as sandbox:
        assert sh(sandbox, f"cat {tmp_path}/data; rm {tmp_path}/data").startswith("of the host")
        assert (tmp_path / "data").exists()


def test_a_commit_makes_an_image_of_what_a_session_has_changed(
    store: ImageStore, image: StoredImage, sandbox: Sandbox
) -> None:
    with sandbox.session() as session:
        line = (
            "rm -r /usr/share; mkdir /usr/share; echo new > /usr/share/new; rm /etc/group; "
            "touch /home/joe/mine; chown 1000:8 /home/joe/mine; ln /home/joe/mine /twice; "
            "chmod 4750 /bin/rootly; mknod /pipe p; ln -s /etc /link; echo gone > /workspace/gone"
        )
        assert not session.run(line, shell=True).stderr
        session.start_command(["sh", "-c", "while :; do echo x >> /growing; done"])
        session.run("until [ -s /growing ]; do :; done", shell=True)
        config = replace(image.config, working_dir="/usr/share", env=("MADE=1",))
        made = session.commit("made:1", config=config, store=store)
        assert session.run(["ls", "/pipe"]).stdout == "/pipe\n"
    assert len(made.layers) == len(image.layers) + 1
    assert store.find("made:1") == made
    with Sandbox(image=made) as other:
        told = sh(
            other, "pwd; echo $MADE; ls; stat -c '%u %g %h %a' /twice /bin/rootly; readlink /link"
        )
        assert told == "/usr/share\n1\nnew\n1000 8 2 644\n0 0 1 4750\n/etc"
        assert "No such file" in sh(other, "ls /etc/group /pipe /workspace/gone")
        assert sh(other, "cat /etc/resolv.conf").startswith(
            "cat: can't open"
        )  # as the image has it
        assert sh(other, "ls -a / | grep -c growing") == "1"


def test_a_commit_needs_an_image() -> None:
    with (
        Sandbox(policy="standard", pool=0) as box,
        box.session() as session,
        pytest.raises(PolicyError, match="commit: needs a session"),
    ):
        session.commit("none:1")


def test_a_policy_shows_paths_where_temporary_files_are(image: StoredImage) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o777)
        policy = policy_of_data({"extends": "workshop", "filesystem": {"write": [place]}})
        with Sandbox(image=image, policy=policy) as sandbox:
            assert (
                sh(sandbox, f"echo here > {place}/file; stat -c %a /var/tmp", user="joe") == "1777"
            )
        assert Path(place, "file").read_text() == "here\n"


def test_programs_start_the_cells_python_again(sandbox: Sandbox) -> None:
    code = (
        "import multiprocessing as m, subprocess, sys\n"
        "if __name__ == '__main__':\n"
        "    print(subprocess.check_output([sys.executable, '-c', 'print(6 * 7)'], text=True))\n"
        "if __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(abs, [-1]))\n"
    )
    assert sandbox.execute(code, filename="spawning.py").stdout.split() == ["42", "[1]"]


def test_what_needs_programs_of_the_host_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="needs programs of the host"):
        sandbox.compile("int main(void) { return 0; }", language="c")
    with pytest.raises(PolicyError, match="needs programs of the host"):
        sandbox.execute("int main(void) { return 0; }", language="c")
    with pytest.raises(PolicyError, match="exec: cannot be combined with an image"):
        sandbox.exec(["true"], project=tmp_path)
    assert [each.name for each in sandbox.languages()] == ["python"]


_WATCHING = """
import ctypes, os, struct
C = ctypes.CDLL(None, use_errno=True)
fd = C.inotify_init1(os.O_NONBLOCK)
watches = [C.inotify_add_watch(fd, path, 0xFFF) for path in (b"/usr/share", b"/etc/passwd", b"/dev", b"/proc")]
open("/usr/share/made", "w").close()
open("/etc/passwd", "a").write("x")
os.listdir("/dev"), os.listdir("/proc")
data, seen = os.read(fd, 65536), []
while data:
    watch, mask, _, length = struct.unpack_from("=iIII", data)
    seen.append([watches.index(watch), mask, data[16:16 + length].rstrip(bytes(1)).decode()])
    data = data[16 + length:]
seen
"""


def test_programs_watch_the_files_of_the_image_and_no_others(sandbox: Sandbox) -> None:
    seen = sandbox.execute(_WATCHING).value
    assert [0, 0x100, "made"] in seen  # IN_CREATE
    assert [1, 0x2, ""] in seen  # IN_MODIFY
    assert {each[0] for each in seen} == {0, 1}


def test_no_program_is_told_what_another_cell_does_with_the_same_layer(sandbox: Sandbox) -> None:
    with sandbox.session() as watching, sandbox.session() as using:
        watching.execute(
            "import ctypes, os\nC = ctypes.CDLL(None, use_errno=True)\n"
            "fd = C.inotify_init1(os.O_NONBLOCK)\n"
            "for path in (b'/usr/share', b'/usr/share/notes', b'/'): C.inotify_add_watch(fd, path, 0xFFF)"
        )
        using.run("cat /usr/share/notes; ls /usr/share /; echo x >> /usr/share/notes", shell=True)
        told = watching.execute(
            "import errno\ntry: told = os.read(fd, 4096)\nexcept BlockingIOError: told = b''\nlen(told)"
        )
        assert told.value == 0
        own = watching.execute("open('/usr/share/notes').read()\nlen(os.read(fd, 4096)) > 0")
        assert own.value is True
