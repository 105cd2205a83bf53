"""The kernel counts inotify descriptors, pending signals and processes by user id: a cell whose root may take
other ids must not have each limit once for each."""

import contextlib
import ctypes
import json
import os
import signal

_C = ctypes.CDLL(None, use_errno=True)
_IDS = (0, 21, 22, 23)
_MOST_DESCRIPTORS, _MOST_SIGNALS = 16, 1024
_MOST_PROCESSES = int(os.environ["SBXT_PROCESSES"])


def descriptors() -> int:
    count = 0
    while count < 500 and _C.inotify_init1(os.O_NONBLOCK) >= 0:
        count += 1
    return count


def signals() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
    count = 0
    while count < 5000 and _C.sigqueue(os.getpid(), int(signal.SIGRTMIN), None) == 0:
        count += 1
    return count


def processes() -> int:
    count = 0
    with contextlib.suppress(OSError):
        while count < 2 * _MOST_PROCESSES:
            if not os.fork():
                signal.pause()
                os._exit(0)
            count += 1
    return count


def of_each_id(hold) -> int:
    """Return how many are held by processes of several ids at once."""
    total, living = 0, []
    for uid in _IDS[1:]:
        told, tell = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            break
        if not pid:
            os.setpgid(0, 0)
            with contextlib.suppress(OSError):
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            os.write(tell, b"%d" % hold())
            signal.pause()
            os._exit(0)
        os.close(tell)
        total += int(os.read(told, 20) or 0)
        living.append(pid)
    for pid in living:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return total


found = {}
for hold, most in (
    (descriptors, _MOST_DESCRIPTORS), (signals, _MOST_SIGNALS), (processes, _MOST_PROCESSES)
):  # fmt: skip
    found[hold.__name__] = (of_each_id(hold), most)
came = [f"{count} {name}" for name, (count, most) in found.items() if count > most]
print(
    json.dumps({"case": "LAY-41", "escaped": bool(came), "detail": ", ".join(came) or str(found)})
)
