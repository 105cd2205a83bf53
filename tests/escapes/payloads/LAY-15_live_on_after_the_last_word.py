"""Say that all is done and do not end: the process that answered goes on, and nothing of it may be left
once the host has its result."""

import ctypes
import json
import os
import time

_PR_SET_NAME = 15


def live_on(_):
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"sbx_survivor", 0, 0, 0)
    time.sleep(120)


os._exit = live_on  # the last that is called, after the last word was sent
detail = "CHECK_HOST: the result came, and no process of the cell is left"
print(json.dumps({"case": "LAY-15", "escaped": False, "detail": detail}))
