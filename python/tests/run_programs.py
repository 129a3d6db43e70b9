"""Runs programs one after the other, each in a fork of a process that has imported torch and uniep once.

    python run_programs.py FILE...

Writes `FILE.log` beside each with what it printed, and prints a line `FILE STATUS`, as os.waitpid() gives it.
"""

import os
import runpy
import sys
import traceback

import uniep  # noqa: F401

for program in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        log = os.open(f"{program}.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(os.path.dirname(program))
        sys.argv, status = [program], 1
        try:
            runpy.run_path(program, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(program, os.waitpid(child, 0)[1], flush=True)
