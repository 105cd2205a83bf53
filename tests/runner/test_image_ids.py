"""The ids of images on the host: which range is chosen, and what the kernel makes of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cellwright.runner.host.image_ids import (
    ImageIds,
    choose_root_ids,
    choose_user_ids,
    find_image_ids,
    one_id,
)
from tests.runner.test_ordinary_user import PYTHON, USER, readable

FIRST = 0x72000000
WHOLE = "         0          0 4294967295\n"
__all__ = ["readable"]  # a fixture

# A child unshares and is mapped; it then makes files of several owners in a directory of its root.
MAKES_FILES = """
import os, sys
sys.path[:0] = {paths!r}
from cellwright.runner.host import image_ids
from cellwright.runner.kernel import process_calls
ids = image_ids.find_image_ids()
{change}
place = os.open(sys.argv[1], os.O_RDONLY)
if os.geteuid() == 0:
    os.chown(place, *ids.root)
told, tell = os.pipe()
heard, answer = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        process_calls.unshare(process_calls.CLONE_NEWUSER)
        os.write(tell, b"1")
        os.read(heard, 1)
        image_ids.become_root(ids)
        os.fchdir(place)
        os.mknod("whiteout", 0o020000)
        for name, owner in (("root", 0), ("other", 33), ("nobody", 65534)):
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o644))
            if owner and ids.kind != "one":
                os.chown(name, owner, owner)
        print(ids.kind, open("/proc/self/setgroups").read(), flush=True)
        try:
            os.mknod("device", 0o020600, os.makedev(1, 3))
        except PermissionError:
            os._exit(0)
    finally:
        os._exit(1)
os.read(told, 1)
image_ids.map_process(pid, ids)
os.write(answer, b"1")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(
    ("maps", "start"),
    [
        ((WHOLE, WHOLE), FIRST),
        (("0 100000 65536\n",) * 2, None),
        (("0 100000 200000\n",) * 2, 131072),
        (("0 100000 300000\n",) * 2, 196608),
        (("0 100000 300000\n", "0 100000 65536\n"), None),
        (("0 0 1000\n100000 100000 200000\n",) * 2, 196608),
    ],
    ids=["host", "small container", "container", "large container", "few groups", "two lines"],
)
def test_roots_range_lies_beside_all_users(
    maps: tuple[str, str], start: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cellwright.runner.host.image_ids.id_for", lambda _: 60000)
    chosen = choose_root_ids(list(maps))
    if start is None:
        assert (chosen.kind, chosen.uids) == ("one", ((0, 60000, 1),))
        assert "map more ids" in chosen.why_one
    else:
        assert (chosen.kind, chosen.uids) == ("root", ((0, start, 65536),))


@pytest.mark.parametrize(
    ("texts", "missing", "uids", "why"),
    [
        (["a:100000:65536\n"] * 2, [], ((0, 1000, 1), (1, 100000, 65535)), ""),
        (["b:1:9\n1000:7:65535"] * 2, [], ((0, 1000, 1), (1, 7, 65535)), ""),
        (
            ["a:100000:40000\na:200000:40000\n"] * 2, [],
            ((0, 1000, 1), (1, 100000, 40000), (40001, 200000, 25535)), "",
        ),
        (["a:100000:65536\n"] * 2, ["newgidmap"], ((0, 1000, 1),), "install the package uidmap"),
        (["a:100000:65536\n", ""], [], ((0, 1000, 1),), "/etc/subgid has less than 65535 ids for a"),
        (["a:100000:9\n"] * 2, [], ((0, 1000, 1),), "/etc/subuid has less"),
        (["a:x:9\na\n\n:::"] * 2, [], ((0, 1000, 1),), "/etc/subuid has less"),
    ],
    ids=["a line", "by number", "two lines", "no helper", "no group", "few", "malformed"],
)  # fmt: skip
def test_a_user_has_subordinate_ids_or_one(
    texts: list[str], missing: list[str], uids: tuple[tuple[int, int, int], ...], why: str
) -> None:
    chosen = choose_user_ids((1000, 1000), "a", texts, missing)
    assert chosen.uids == uids
    assert why in chosen.why_one
    assert (chosen.kind == "one") == bool(why)


def test_each_map_has_a_name_of_its_own() -> None:
    lines = ((0, 1000, 1), (1, 100000, 65535))
    maps = [one_id(1000), one_id(1001), one_id(1000, 1001), ImageIds("subordinate", lines, lines)]
    assert len({each.name for each in maps}) == len(maps)


def owners(place: Path) -> dict[str, tuple[int, int]]:
    found = {each.name: each.lstat() for each in place.iterdir()}
    return {name: (status.st_uid, status.st_gid) for name, status in found.items()}


def make_files(place: Path, change: str = "", prefix: tuple[str, ...] = (sys.executable,)) -> str:
    """Run MAKES_FILES; return what the mapped process says."""
    paths = [str(place.parent)] if prefix[1:] else [path for path in sys.path if path]
    done = subprocess.run(
        [*prefix, "-I", "-c", MAKES_FILES.format(paths=paths, change=change), str(place)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.needs("root", "userns")
@pytest.mark.parametrize("kind", ["root", "one"])
def test_root_maps_a_range_or_one_id(kind: str, tmp_path: Path) -> None:
    change = "ids = image_ids.one_id(0x72000000)" if kind == "one" else ""
    ids = find_image_ids() if kind == "root" else one_id(FIRST)
    setgroups = "allow" if kind == "root" else "deny"
    assert make_files(tmp_path, change) == f"{kind} {setgroups}"
    start = ids.root[0]
    others = {"other": (start + 33,) * 2, "nobody": (start + 65534,) * 2}
    if kind == "one":
        others = dict.fromkeys(others, (start, start))
    assert owners(tmp_path) == {"whiteout": (start, start), "root": (start, start), **others}


# Another /etc/passwd and others, in a mount namespace of its own; then an ordinary user.
AS_USER = """
set -e
cd "$1"
touch /etc/subuid /etc/subgid
for each in passwd subuid subgid; do mount --bind "$each" /etc/$each; done
shift
exec setpriv --reuid 54322 --regid 54322 --clear-groups "$@"
"""


def command_of_user(etc: Path, kind: str) -> tuple[str, ...]:
    """Return the beginning of a command line of an ordinary user, with subordinate ids or without."""
    (etc / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nsub:x:{USER}:{USER}::/:/bin/sh\n")
    for name in ("subuid", "subgid"):
        (etc / name).write_text("sub:3000000:65536\n" if kind == "subordinate" else "")
    return "unshare", "-m", "sh", "-c", AS_USER, "sh", str(etc), PYTHON


@pytest.mark.needs("root", "userns", "newuidmap", "setpriv", "mount")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no Python that every user may read")
@pytest.mark.parametrize("kind", ["subordinate", "one"])
def test_a_user_maps_subordinate_ids_or_its_own(kind: str, readable: Path, tmp_path: Path) -> None:
    place = readable / kind
    place.mkdir()
    os.chown(place, USER, USER)
    prefix = command_of_user(tmp_path, kind)
    setgroups = "allow" if kind == "subordinate" else "deny"
    assert make_files(place, prefix=prefix) == f"{kind} {setgroups}"
    others = {"other": 3000032, "nobody": 3065533}
    if kind == "one":
        others = dict.fromkeys(others, USER)
    expected = {"whiteout": USER, "root": USER, **others}
    assert owners(place) == {name: (number, number) for name, number in expected.items()}
