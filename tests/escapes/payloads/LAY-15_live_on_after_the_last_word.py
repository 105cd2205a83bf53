"""Say that all is done and do not end: the process that answered goes on, and nothing of it may be left
once the host has its result."""

import ctypes
import json
import sys
import time


def say_and_live_on(*given, say, name_process=ctypes.CDLL(None).prctl, sleep=time.sleep):  # noqa: B008
    """Names of the program are cleared at its end, so they are defaults here."""
    say(*given)
    name_process(15, b"sbx_survivor", 0, 0, 0)  # PR_SET_NAME
    sleep(120)


frame = sys._getframe()
while frame and not (frame.f_code.co_name == "_run" and "report" in frame.f_globals):
    frame = frame.f_back
if frame:  # it runs one program, and calls `report` for the last word; a session has no such frame
    inside, run = frame.f_globals, say_and_live_on
    inside["report"] = lambda *given, say=inside["report"], run=run: run(*given, say=say)
detail = "CHECK_HOST: the result came, and no process of the cell is left"
print(json.dumps({"case": "LAY-15", "escaped": False, "detail": detail}))
