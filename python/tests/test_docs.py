"""Every program of docs/pytorch.md runs."""

import pathlib
import re
import subprocess
import sys

import pytest

from test_distributed import torchrun

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number, scratch):
    program = scratch / "program.py"
    program.write_text(PROGRAMS[number])
    if "init_process_group" in PROGRAMS[number]:
        assert "uniep.Group(rank 1 of 2, cpu, transport torch" in torchrun(2, program)
    else:
        subprocess.run([sys.executable, str(program)], check=True)


def test_there_are_programs():
    assert len(PROGRAMS) == 5
