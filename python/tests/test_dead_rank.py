"""A rank that dies or stands still between two layers, with transport torch over gloo: what the others say and when."""

import re
import signal
import subprocess
import sys

import pytest

from test_distributed import HERE

TIMEOUT_S, MORE_S = 3, 15  # of the process group; for Python and a machine that is busy


def start(rank: int, ranks: int, *arguments: str) -> subprocess.Popen:
    line = [sys.executable, HERE / "run_and_leave.py", HERE / "dead_rank_checks.py", str(rank), str(ranks), *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(("how", "where"), [("killed", "forward"), ("killed", "backward"), ("stopped", "forward")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_goes_is_an_error_of_the_others(ranks, how, where, scratch):
    processes = [start(rank, ranks, str(scratch / "ranks"), how, where) for rank in range(ranks)]
    try:
        texts = [process.communicate(timeout=100)[0] for process in processes[:-1]]
        for rank, (process, text) in enumerate(zip(processes, texts, strict=False)):
            assert process.returncode == 0, text
            first, *again = text.splitlines()
            seconds, message = first.split(maxsplit=1)
            assert message.startswith(f"group: rank {rank} of {ranks} did not get "), text
            assert " gloo says: " in message
            what = "what the ranks are about to call" if where == "forward" else "rows for its experts"
            assert what in message or ranks == 3, text  # a rank may be told later, by the end of another one
            if how == "killed":
                assert f"rank {ranks - 1} (process {processes[-1].pid})" in message, text
            else:
                others = ", ".join(str(other) for other in range(ranks) if other != rank)
                assert f"it waited for ranks {others}, and none is known" in message or "gone: " in message, text
            assert float(seconds) < TIMEOUT_S + MORE_S, text
            assert [line.split(maxsplit=1)[1] for line in again if line.startswith("again")] == [message] * 3, text
            gone = "recover: group: gone: "
            end = rf"{gone}.*rank {ranks - 1} \(" if how == "killed" else rf"{gone}|recover: {re.escape(message)}$"
            assert re.match(end, again[3]), text
            assert float(again[-1].split()[0]) < 1, text  # what is known is not waited for again
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        codes = [process.wait() for process in processes]
    assert codes == [0] * (ranks - 1) + [-signal.SIGKILL]
