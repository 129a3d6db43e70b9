"""The plugin beside released versions of Megatron-core, on a CPU: one start a line.

UNIEP_MEGATRON_VERSIONS names a folder with a folder for each other version, named as it, as scripts/python_tests.sh
makes it; UNIEP_REQUIRE_MEGATRON=1 makes failures of what would be skipped.
"""

import importlib.util
import json
import os
import pathlib
import re
import sys
import types

import pytest
import torch

import uniep
from ranks import HERE, run_ranks

REQUIRED = os.environ.get("UNIEP_REQUIRE_MEGATRON") == "1"
OTHER_VERSIONS = ["0.17.1", "0.18.2"]


def need(found, what):
    if not found:
        (pytest.fail if REQUIRED else pytest.skip)(f"{what} is not installed")


@pytest.fixture
def megatron():
    need(importlib.util.find_spec("megatron") is not None, "megatron-core")


RUNS = [("checks", 1), ("checks", 4), ("option_checks", 2), ("parallel_checks", 4), ("training_checks", 2)]


@pytest.mark.parametrize(("script", "ranks"), RUNS)
def test_megatron(megatron, script, ranks):
    assert f"checks passed on {ranks} ranks" in run_ranks(ranks, HERE / f"megatron_{script}.py")


def fsdp_losses(whose):
    text = run_ranks(2, HERE / "megatron_fsdp_checks.py", whose, timeout=150)
    assert "checks passed on 2 ranks" in text
    losses = {name: json.loads(losses) for name, losses in re.findall(r"^losses (.*): (.*)$", text, re.MULTILINE)}
    (norm,) = re.findall(r"^norm: (.*)$", text, re.MULTILINE)
    return losses, float(norm)


def test_megatron_fsdp(megatron):
    """Close enough to see a micro-batch whose weight gradients are lost."""
    try:
        theirs, their_norm = fsdp_losses("theirs")
    except AssertionError:  # over gloo it hung or crashed, once in some thirty runs
        theirs, their_norm = fsdp_losses("theirs")
    ours, our_norm = fsdp_losses("ours")
    assert our_norm == pytest.approx(their_norm, rel=2e-3)  # without the first of two calls: 3 % less
    assert len(theirs) == 3 and list(ours) == list(theirs)
    for name, losses in ours.items():
        assert losses == pytest.approx(theirs[name], rel=5e-4), name
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_other_versions(megatron, version, monkeypatch):
    folder = pathlib.Path(os.environ.get("UNIEP_MEGATRON_VERSIONS", "none")) / version
    need((folder / "megatron").is_dir(), f"megatron-core {version}")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    assert "checks passed on 2 ranks" in run_ranks(2, HERE / "megatron_version_checks.py", version)


def test_program_for_gpus(megatron):
    options = ["--cpu", "--tiny", "--steps", "2", "--repeat", "2", "--only", "EP1"]
    assert "6 of 6 runs passed" in run_ranks(1, HERE / "gpu_megatron.py", *options)


def test_the_hook_of_an_in_process_restart_ends_all_groups(megatron, monkeypatch):
    import uniep.megatron

    with pytest.raises(ImportError, match="nvidia_resiliency_ext"):
        uniep.megatron.abort_hook()

    class Abort:
        pass

    inprocess = types.ModuleType("nvidia_resiliency_ext.inprocess")
    inprocess.abort = types.SimpleNamespace(Abort=Abort)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", types.ModuleType("nvidia_resiliency_ext"))
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.inprocess", inprocess)
    group, state = uniep.Group(workers=3), object()
    hook = uniep.megatron.abort_hook()
    assert isinstance(hook, Abort)
    assert hook(state) is state
    with pytest.raises(TimeoutError, match="group: aborted"):
        group.check()
    group.close()


def test_the_optimizer_goes_on_behind_an_in_process_restart(megatron):
    """Calls of the attempt that was aborted are not asked for, although something still refers to its group."""
    from uniep.late_errors import note_call

    asked = []
    aborted, new = (uniep.Group("self", workers=workers) for workers in (2, 3))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.MonkeyPatch.context() as patch, new:
        for group in (aborted, new):
            note_call(group, (128, 8))
            patch.setattr(group, "synchronize", lambda group=group: asked.append(group))
        aborted.abort()
        torch.optim.SGD([weight], lr=1.0).step()
    assert asked == [new] and torch.equal(weight, torch.zeros(2))
