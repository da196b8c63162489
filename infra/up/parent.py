"""A supervised process ends with its supervisor, also when that one is killed."""

import ctypes
import os
import signal
import sys
import threading
import time

import psutil

SUPERVISOR_PID = "GROUPSTREAM_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1
_CHECK_S = 1.0


def die_with_supervisor() -> None:
    """Ends this process when its parent ends, if a supervisor started it. Else does nothing.

    The parent is the supervisor, or torchrun between it and us.
    """
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is None:
        return
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent or not psutil.pid_exists(int(supervisor)):
        os._exit(1)  # it ended before we began to watch


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(1)
