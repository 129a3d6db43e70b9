"""Every program of the pages for Python runs, and so does torchtitan's command line."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from test_distributed import torchrun
from titan_assets import write_assets

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
NEEDS = {"pytorch": "torch", "transformers": "transformers", "verifier": "torch"}
PROGRAMS = [
    pytest.param(
        program,
        id=f"{page}-{number}",
        marks=pytest.mark.skipif(importlib.util.find_spec(needs) is None, reason=f"{needs} is not installed"),
    )
    for page, needs in NEEDS.items()
    for number, program in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    )
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_program(text, scratch):
    program = scratch / "program.py"
    program.write_text(text)
    if "init_process_group" in text:
        assert "uniep.Group(rank 1 of 2, cpu, transport torch" in torchrun(2, program)
    else:
        subprocess.run([sys.executable, str(program)], check=True, cwd=scratch)


def test_there_are_programs():
    assert len(PROGRAMS) == 12


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitans_command(scratch, monkeypatch):
    """The first command of the page, with the debug model that trains on a CPU and three short steps."""
    command, options = re.findall(r"^    (.*--override.imports.*)$", (DOCS / "torchtitan.md").read_text(), re.MULTILINE)
    words = shlex.split(command)
    assert words[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "torchtitan.train"]
    flags = words[5:]
    flags[flags.index("qwen3")] = "titan_cpu"
    flags[flags.index("qwen3_moe_debug")] = "qwen3_moe"
    flags = flags[: flags.index("--override.imports")] + shlex.split(options)
    flags += ["--parallelism.spmd_backend", "partial_dtensor", "--training.steps", "3"]
    flags += ["--training.seq_len", "32", "--training.local_batch_size", "1"]
    write_assets(scratch)
    monkeypatch.chdir(scratch)
    text = torchrun(2, pathlib.Path(__file__).resolve().parent / "titan_cpu.py", *flags)
    assert "UniEPRoutedExperts" in text and re.search(r"step: *3.*loss:", text), text[-3000:]
