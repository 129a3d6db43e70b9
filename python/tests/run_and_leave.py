"""Runs a program, and ends the process at once behind it.

Where anything still refers to a destroyed gloo process group as the interpreter ends, torch 2.12 now and then aborts
("terminate called without an active exception"), also in programs without uniep.
"""

import multiprocessing
import os
import pathlib
import runpy
import sys
import typing


def run(program: str) -> typing.NoReturn:
    """Its arguments are sys.argv[1:]. Raises what it raises."""
    sys.path[0] = str(pathlib.Path(program).resolve().parent)
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    # What the interpreter would do: Megatron-core's writer of checkpoints is a process that waits for more to write.
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(sys.argv[0])
