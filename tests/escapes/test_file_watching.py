"""inotify: tells of the cell's own files, and not of what programs of the host do."""

import pytest

from cellwright import Sandbox
from cellwright.runner.cell import enter
from cellwright.runner.kernel import notifications
from cellwright.runner.kernel.notifications import Notification
from cellwright.runner.listening.file_watches import FileWatches
from tests.conftest import OPTIONAL

pytestmark = pytest.mark.skipif("listener" in OPTIONAL, reason="the listener makes the watches")

_WATCH = """
import contextlib, ctypes, errno, os, struct
C = ctypes.CDLL(None, use_errno=True)
def add(fd, path, mask=0xFFF):
    watch = C.inotify_add_watch(fd, path.encode(), mask)
    return watch if watch > 0 else errno.errorcode[ctypes.get_errno()]
def told(fd):
    names = []
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 65536):
            while data:
                _, mask, _, length = struct.unpack_from("=iIII", data)
                names.append([mask & 0xFFF, data[16:16 + length].rstrip(bytes(1)).decode()])
                data = data[16 + length:]
    return names
fd = C.inotify_init1(os.O_NONBLOCK)
"""
_OF_HOST = (
    _WATCH
    + """
paths = ["/usr", "/dev/null", "/", "/etc/passwd", "/proc/self/exe", "/workspace/usr"]
os.symlink("/usr", "/workspace/usr")
watches = [add(fd, path) for path in paths]
for path in paths:
    with contextlib.suppress(OSError): os.listdir(path)
    with contextlib.suppress(OSError): open(path, "rb").read(1)
open("/dev/null", "w").write("x")
[min(watches) > 0, len(told(fd))]
"""
)
CREATE, MODIFY, CLOSE_WRITE, OPEN, MOVED_TO = 0x100, 0x2, 0x8, 0x20, 0x80


def test_a_watch_tells_nothing_of_the_host(standard: Sandbox) -> None:
    assert standard.execute(_OF_HOST).value == [True, 0]


def test_a_watch_that_the_kernel_makes_tells_of_the_host(
    standard: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def let_go_on(watches: FileWatches, notification: Notification) -> None:
        notifications.let_go_on(watches._listener, notification)

    monkeypatch.setattr(FileWatches, "answer", let_go_on)
    watched, events = standard.execute(_OF_HOST).value
    assert watched
    assert events > 0


_OWN = (
    _WATCH
    + """
os.makedirs("/workspace/d/e"); os.symlink("e", "/workspace/d/link"); os.chdir("/workspace/d")
os.symlink("/workspace/d/e", "/workspace/d/absolute")
os.symlink("/workspace/d", "/tmp/far"); os.symlink("/workspace/circle", "/workspace/circle")
same = [add(fd, path) for path in ("e", "/workspace/d/e", "link", "../d/e/", "./e/../link", "absolute", "/tmp/far/absolute")]
others = [add(fd, "link", 0x2000FFF), add(fd, "nothing"), add(fd, ""), add(fd, "x" * 5000), add(1, "e"), add(99, "e"),
          add(fd, "e", 0), add(fd, "/dev/shm") == add(fd, "/tmp"), add(fd, "/workspace/circle") in same, add(fd, "absolute", 0x2000FFF) in same]
open("e/made", "w").write("x"); os.rename("e/made", "e/moved")
[len(set(same)), others[1:], others[0] not in same, told(fd)]
"""
)


def test_a_watch_tells_of_the_cells_own_files(standard: Sandbox) -> None:
    different, answers, is_another, events = standard.execute(_OWN).value
    assert different == 1
    assert answers == [
        "ENOENT",
        "ENOENT",
        "ENAMETOOLONG",
        "EINVAL",
        "EBADF",
        "EINVAL",
        True,
        False,
        False,
    ]
    assert is_another
    wanted = [[CREATE, "made"], [OPEN, "made"], [MODIFY, "made"], [CLOSE_WRITE, "made"]]
    assert events[:4] == wanted
    assert [MOVED_TO, "moved"] in events


_MANY = (
    _WATCH
    + """
more = 0
while C.inotify_init1(0) >= 0: more += 1
watches = 0
for number in range(20_000):
    os.mkdir(f"/tmp/{number}")
    answer = add(fd, f"/tmp/{number}")
    if isinstance(answer, str): break
    watches += 1
[1 + more, watches, answer]
"""
)


def test_descriptors_and_watches_are_limited(standard: Sandbox) -> None:
    most = standard.policy.limits.memory_bytes // enter._BYTES_A_WATCH
    assert standard.execute(_MANY).value == [enter._MOST_INOTIFY, most, "ENOSPC"]


def test_a_computation_has_no_inotify(strict: Sandbox) -> None:
    code = "import ctypes; C = ctypes.CDLL(None, use_errno=True)\n[C.inotify_init1(0), ctypes.get_errno()]"
    assert strict.execute(code).value == [-1, 38]
