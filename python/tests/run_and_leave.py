"""Runs a program, and ends the process at once behind it.

Where anything still refers to a destroyed gloo process group as the interpreter ends, torch 2.12 now and then aborts
("terminate called without an active exception"), also in programs without uniep.
"""

import os
import pathlib
import runpy
import sys

program = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path[0] = str(pathlib.Path(program).resolve().parent)
try:
    runpy.run_path(program, run_name="__main__")
except SystemExit as end:
    if end.code not in (None, 0):
        raise
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
