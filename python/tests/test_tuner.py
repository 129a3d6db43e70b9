"""uniep.Tuner: arguments here, and trainings by tuner_checks.py."""

import pathlib

import pytest

import tuner_checks
import uniep
from ranks import HERE, run_ranks
from uniep import library


def test_trainings_on_two_processes():
    assert "8 checks passed on 2 ranks" in run_ranks(2, HERE / "tuner_checks.py")


def test_trainings_on_one(scratch):
    tuner_checks.check_losses_and_weights("")
    tuner_checks.check_kept_in_a_folder(scratch)


def test_arguments():
    for wrong in ({"until": -1}, {"budget": 0}, {"budget": 2}, {"batch": 0}, {"batch": 65}, {"job_group": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: {next(iter(wrong.values()))}; must be"):
            uniep.Tuner(**wrong)
    with uniep.Tuner(), pytest.raises(ValueError, match="there is another one"):
        uniep.Tuner()
    with uniep.Tuner() as tuner:
        tuner.step()
        assert tuner.decisions == [] and not tuner.frozen and tuner.spent == (0, 0, 0)


def test_structures_are_those_of_the_header():
    sizes = {"TunerLayer": 40, "TunerCheck": 32, "TunerOptions": 120, "TunerCall": 40, "TunerState": 56}
    header = pathlib.Path(HERE.parents[1] / "src" / "api" / "c_struct.h").read_text()
    names = {"TunerLayer": "layer", "TunerCheck": "check", "TunerOptions": "options", "TunerCall": "call"}
    names |= {"TunerState": "state", "TunerDecision": "decision"}
    for name, word in names.items():
        size = sizes.get(name, 64)
        assert f"kFirstSize<uniep_tuner_{word}> = {size};" in header
        assert library.ctypes.sizeof(getattr(library, name)) == size
