"""Runs a program on so many ranks, each a fork of a process that has done the program's first imports once.

    python fork_ranks.py RANKS PROGRAM [ARGUMENT...]

An import of Megatron-core takes eight seconds of a processor. Where a rank fails the others are killed, and the status
of this process is 1.
"""

import ast
import os
import pathlib
import signal
import sys
import traceback
import warnings

import run_and_leave


def import_first(program: str) -> None:
    """The imports that come before anything else in it, in their order."""
    for statement in ast.parse(pathlib.Path(program).read_text()).body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            break
        exec(compile(ast.Module([statement], []), program, "exec"), {})


def start(rank: int, program: str) -> int:
    process = os.fork()
    if process == 0:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        try:
            run_and_leave.run(program)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return process


if __name__ == "__main__":
    ranks, program = int(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(pathlib.Path(program).resolve().parent)
    import_first(program)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The other thread is one of numpy's that waits for work; a fork gets its own.
        warnings.simplefilter("ignore", DeprecationWarning)
        running = {start(rank, program): rank for rank in range(ranks)}
    failed = False
    while running:
        process, status = os.wait()
        rank = running.pop(process)
        if status and not failed:
            failed = True
            print(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            for other in running:
                os.kill(other, signal.SIGKILL)
    sys.exit(failed)
