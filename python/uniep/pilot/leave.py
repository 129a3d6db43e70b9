"""The end of the process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import typing


def leave(status: int) -> typing.NoReturn:
    """Ends the process at once: with torch 2.12's gloo an ordinary end aborts now and then, behind all work."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
