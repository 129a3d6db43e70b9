"""Whom three runs that disagree speak against, of sums of which everything is known."""

from __future__ import annotations

import types

import pytest
import torch

from uniep import rerun, verifier

RANKS, TOPK = 4, 2


def three_runs() -> tuple[rerun.Noted, list[rerun.Sums]]:
    """A token of rank 3, whose slots go to the experts of ranks 1 and 2; an expert a rank, all of them in turn."""
    group = types.SimpleNamespace(size=RANKS, rank=3)
    call = types.SimpleNamespace(group=group, shape=(64, 64, RANKS), topk=TOPK, w2=[torch.empty(1, 64, 64)])
    noted = rerun.Noted(call, "forward", 0)
    noted.slots = [[1, 2]]
    runs = [{"o": torch.full((TOPK, 1), 7), "y": torch.full((1, 1), 7)} for _ in range(3)]
    return noted, runs


def candidates(noted: rerun.Noted, runs: list[rerun.Sums], shifts: list[int]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(one.tensor, one.run, one.candidates) for one in verifier._evidence(noted, runs, shifts)]


def test_runs_that_agree_speak_against_nobody() -> None:
    noted, runs = three_runs()
    assert candidates(noted, runs, [0, 1, 2]) == []


@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_wrong_row_is_the_ranks_that_computed_it(run: int) -> None:
    noted, runs = three_runs()
    runs[run]["o"][1] = runs[run]["y"][0] = 9
    assert candidates(noted, runs, [0, 1, 2]) == [("o", run, ((2 + run) % RANKS,))]


def test_a_wrong_sum_is_the_ranks_that_added() -> None:
    noted, runs = three_runs()
    runs[1]["y"][0] = 9
    assert candidates(noted, runs, [0, 1, 2]) == [("y", 1, (3,))]


def test_a_row_without_a_majority_may_explain_its_sum() -> None:
    noted, runs = three_runs()
    runs[0]["o"][1], runs[1]["o"][1], runs[0]["y"][0] = 8, 9, 9  # of the second no bit is left in its sum
    assert candidates(noted, runs, [0, 0, 0]) == [("o", -1, ()), ("y", 0, (2, 3))]


def test_sums_blame_all_their_rows_where_rows_are_not_known() -> None:
    noted, runs = three_runs()
    for one in runs:
        del one["o"]
    runs[0]["y"][0] = 9
    assert candidates(noted, runs, [0, 1, 2]) == [("y", 0, (1, 2, 3))]
