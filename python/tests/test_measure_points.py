"""bench/measure_points.py on the cpu engine: its sets, Schedules and failures; what times it finds is no test."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from conftest import BUILD

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
COMMAND = [sys.executable, str(BENCH / "measure_points.py"), str(BUILD / "uniep"), "--cpu", "--ranks", "2"]


def test_points_are_of_the_same_schedules_in_all_sets(tmp_path):
    rows, sets = tmp_path / "rows", ["64,32,8,2:64:uniform", "64,32,8,2:40:zipf:1", "128,32,8,2:64:as-eight"]
    command = [*COMMAND, "--random", "4", "--near", "3", "--rounds", "1", "--budget", "1"]
    command += ["--json", str(rows), "--sets"]
    environment = {**os.environ, "UNIEP_CACHE_DIR": str(tmp_path / "cache")}

    def said(*of):
        done = subprocess.run([*command, *of], check=True, capture_output=True, text=True, env=environment)
        return done.stdout.splitlines()

    assert len(said(*sets[:2])) == 2
    before = rows.read_text()
    # What is there is not measured again, and the Schedules are those that all sets of a run can have.
    assert [line.split()[0] for line in said(*sets)] == [one.split(":")[0] for one in sets]
    assert rows.read_text().startswith(before)
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["tokens"], row["routing"]) for row in found] == [(64, "uniform"), (40, "zipf:1"), (64, "as-eight")]
    first, second = ([one["schedule"] for one in row["tried"]] for row in found[:2])
    assert first == second and len(first) == 8
    assert {row["budget"] for row in found} == {1}
    for row in found:
        assert all(one["calls"] > 0 and one["verdict"] not in ("failed", "wrong") for one in row["tried"])
    listed = [json.loads(line) for line in said(*sets, "--list")]
    assert len(listed) == 7 and sum(len(one) > 20 for one in listed) == 4
    assert all(one["save.z"] == "keep" for one in listed if "save.z" in one)
    # What searches find is kept apart: the user's own search would take it for its own.
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".cubin"]


def listed(*words):
    command = [*COMMAND, "--list", "--random", "0", "--near", "24", "--sets", "64,32,8,2:64:uniform", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {field for line in done.stdout.splitlines() for field in json.loads(line)}


def test_fields_of_one_direction_differ_in_it_alone():
    assert not [name for name in listed() if name.startswith(("backward.", "tile.dgrad", "tile.wgrad", "save."))]
    fields = listed("--direction", "backward")
    assert not [name for name in fields if name.startswith(("tile.fc", "save."))]
    assert [name for name in fields if name.startswith("backward.")]


# Instead of `uniep`: searches fail in some sets, and keep what they tried.
FAILS = """#!/bin/bash
[ "$1" = tune ] || exec {uniep} "$@"
echo "$@" >>{folder}/called
cat "$UNIEP_CACHE_DIR"/a.tried >>{folder}/known 2>/dev/null
printf 'failed\\tfusion=none\\tthe program ended\\nslower\\tfusion=pairs\\t\\n' >"$UNIEP_CACHE_DIR/a.tried"
[[ -e {folder}/killed && "$*" == *"--tokens 40"* ]] && {{ kill -TERM 0; sleep 20; }}
[[ -e {folder}/broken && "$*" == *"--tokens 64"* ]] && kill -SEGV $$
exec {uniep} "$@"
"""


@pytest.fixture
def points(tmp_path):
    program = tmp_path / "uniep"
    program.write_text(FAILS.format(uniep=BUILD / "uniep", folder=tmp_path))
    program.chmod(0o755)
    command = [sys.executable, str(BENCH / "measure_points.py"), str(program), "--cpu", "--ranks", "2", "--random", "2"]
    command += ["--near", "2", "--rounds", "1", "--budget", "1", "--json", str(tmp_path / "rows"), "--sets"]
    command += ["64,32,8,2:64:uniform", "64,32,8,2:40:as-eight"]

    def run():
        return subprocess.run(command, capture_output=True, text=True, start_new_session=True)

    return run


def tokens_of(rows):
    return [json.loads(line)["tokens"] for line in rows.read_text().splitlines()]


def test_a_set_that_fails_is_left_out_and_what_ended_it_is_not_met_again(points, tmp_path):
    (tmp_path / "broken").touch()
    done = points()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "measure_points.py: no times of 64,32,8,2:64:uniform"
    assert tokens_of(tmp_path / "rows") == [40]
    (tmp_path / "broken").unlink()
    (tmp_path / "known").unlink()
    done = points()
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    assert tokens_of(tmp_path / "rows") == [40, 64]
    # It knows what has failed, and times again what was only slower.
    assert (tmp_path / "known").read_text() == "failed\tfusion=none\tthe program ended\n"
    called = (tmp_path / "called").read_text()
    assert "--again" not in called and "--routing as-eight.npy" in called


def test_a_run_that_is_cut_goes_on_with_the_set_that_it_was_in(points, tmp_path):
    (tmp_path / "killed").touch()
    assert points().returncode == 128 + signal.SIGTERM
    assert tokens_of(tmp_path / "rows") == [64]
    assert (tmp_path / "rows.tried" / "a.tried").exists()
    (tmp_path / "killed").unlink()
    assert points().returncode == 0
    assert tokens_of(tmp_path / "rows") == [64, 40]
