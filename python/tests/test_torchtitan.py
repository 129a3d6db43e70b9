"""The plugin beside a released torchtitan, on a CPU: one start a size, and torchtitan's own trainer."""

import importlib.util
import os
import pathlib
import re

import pytest

from ranks import run_ranks
from titan_assets import write_assets

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
HERE = pathlib.Path(__file__).resolve().parent
STEPS = int(os.environ.get("UNIEP_TEST_STEPS", "12"))  # of a model that trains; two and a half seconds each


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers(ranks):
    assert f"checks passed on {ranks} ranks" in run_ranks(ranks, HERE / "torchtitan_checks.py")


def train(*flags: str) -> list[float]:
    """The losses of Qwen3's debug model on two ranks, expert-parallel, with the current folder's assets."""
    text = run_ranks(
        2,
        HERE / "titan_cpu.py",
        *["--module", "titan_cpu", "--config", "qwen3_moe", "--training.steps", str(STEPS), "--training.seq_len", "64"],
        *["--training.local_batch_size", "1", "--training.disable_cuda_graphs", "--debug.seed", "1"],
        *["--parallelism.expert_parallel_degree", "2", "--parallelism.spmd_backend", "partial_dtensor"],
        *flags,
    )
    losses = {int(step): float(loss) for step, loss in re.findall(r"step: *(\d+).*?loss: *([\d.]+)", text)}
    assert sorted(losses) == list(range(1, STEPS + 1)), text[-3000:]
    return [losses[step] for step in range(1, STEPS + 1)]


def test_qwen3_trains(scratch, monkeypatch):
    write_assets(scratch)
    monkeypatch.chdir(scratch)
    stock = train()
    ours = train("--override.imports", "uniep.torchtitan.routed_experts")
    assert stock[-1] < 0.8 * stock[0]
    for step, (theirs, own) in enumerate(zip(stock, ours, strict=True), 1):
        assert abs(own - theirs) < 0.005 * theirs, (step, own, theirs)
    assert ours != stock  # it was not the stock layer twice
