"""Every program of the pages for Python runs, and so does torchtitan's command line; links lead somewhere."""

import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from ranks import HERE, run_ranks
from titan_assets import write_assets

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
NEEDS = {
    "pytorch": "torch",
    "pytorch_parallel": "torch",
    "pytorch_reference": "torch",
    "nodes": "torch",
    "transformers": "transformers",
    "verifier": "torch",
}
PROGRAMS = {
    f"{page}-{number}": (needs, program)
    for page, needs in NEEDS.items()
    for number, program in enumerate(
        re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL)
    )
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """What the programs of one process ended with and printed, by name."""
    folder = tmp_path_factory.mktemp("programs")
    files = {}
    for name, (needs, program) in PROGRAMS.items():
        if "init_process_group" not in program and importlib.util.find_spec(needs) is not None:
            files[name] = folder / name / "program.py"
            files[name].parent.mkdir()
            files[name].write_text(program)
    runner = [sys.executable, str(HERE / "run_programs.py"), *map(str, files.values())]
    done = subprocess.run(runner, check=True, capture_output=True, text=True, timeout=500)
    statuses = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines())
    return {name: (statuses[str(file)], pathlib.Path(f"{file}.log").read_text()) for name, file in files.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, request, scratch):
    needs, program = PROGRAMS[name]
    ranks = 4 if name.startswith("nodes") else 2
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    if "init_process_group" in program:
        file = scratch / "program.py"
        file.write_text(program)
        assert "uniep.Group(rank 1 of 2, cpu, transport torch" in run_ranks(ranks, file)
    else:
        status, printed = request.getfixturevalue("ended")[name]
        assert status == "0", printed


def test_there_are_programs():
    assert len(PROGRAMS) == 14


def anchors(page: pathlib.Path) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    pages = [*DOCS.parent.glob("*.md"), *DOCS.glob("*.md"), *(DOCS.parent / "lab").glob("*.md")]
    seen, wrong = 0, []
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if link.startswith("http"):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            seen += 1
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(DOCS.parent)}: {link}")
    assert seen > 300 and not wrong


def test_no_page_says_a_thing_twice():
    pages = sorted(DOCS.glob("*.md"))
    assert len(pages) > 20
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        lines = [line for line in text.split("\n") if (len(line) > 80 and line[0] not in " |") or line.startswith("#")]
        assert len(lines) == len(set(lines)), f"{page.name}: {max(lines, key=lines.count)}"


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
    text = run_ranks(2, HERE / "titan_cpu.py", *flags)
    assert "UniEPRoutedExperts" in text and re.search(r"step: *3.*loss:", text), text[-3000:]
