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
    call = types.SimpleNamespace(group=group, shape=(64, 64, RANKS), topk=TOPK, name="")
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


def test_a_wrong_dprob_is_its_experts_or_its_tokens_ranks() -> None:
    noted, runs = three_runs()
    for one in runs:
        one["dprobs"] = torch.full((TOPK, 1), 7)
    runs[0]["dprobs"][1] = 9
    assert candidates(noted, runs, [0, 1, 2]) == [("dprobs", 0, (2, 3))]
    noted.slots = [[1, -1]]
    for one in runs:
        del one["o"]
    assert candidates(noted, runs, [0, 1, 2]) == [("dprobs", 0, (3,))]


def _ordinary(count: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count) - 40
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(5, 128), (3, 200), (7, 1), (0, 128), (300, 384)])
def test_one_changed_bit_changes_one_checksum(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "BYTES_AT_ONCE", 1 << 14)
    given = _ordinary(shape[0] * shape[1], dtype).view(shape)
    sums = rerun.tile_sums(given)
    assert sums.shape == (shape[0], -(-shape[1] // rerun.COLUMNS))
    size = given.element_size()
    for value in range(0, given.numel(), 1 + given.numel() // 7):
        for bit in (0, 8 * size - 1 if dtype != torch.bool else 0):
            changed = given.clone()
            changed.view(torch.uint8).view(-1)[value * size + bit // 8] ^= 1 << bit % 8
            where = (rerun.tile_sums(changed) != sums).nonzero().tolist()
            assert where == [[value // shape[1], value % shape[1] // rerun.COLUMNS]], (value, bit)


def test_nans_are_alike_in_results_and_not_in_memory() -> None:
    one = torch.full((2, 128), torch.nan, dtype=torch.bfloat16)
    other = one.clone()
    other.view(torch.int16)[0, 3] = 0x7FA1
    assert torch.equal(rerun.tile_sums(one), rerun.tile_sums(other))
    assert not torch.equal(rerun.tile_sums(one, nans_alike=False), rerun.tile_sums(other, nans_alike=False))


def test_rows_that_do_not_begin_at_a_word_have_checksums() -> None:
    whole = _ordinary(2 * 129, torch.bfloat16)
    assert torch.equal(rerun.tile_sums(whole[1:129].view(1, 128)), rerun.tile_sums(whole[1:129].clone().view(1, 128)))
    assert torch.equal(rerun.tile_sums(whole.view(2, 129)[:, 1:]), rerun.tile_sums(whole.view(2, 129)[:, 1:].clone()))


def test_one_suspect_needs_two_earlier_findings_and_never_becomes_a_wrong_rank() -> None:
    watching = verifier.Verifier(every=1)
    try:
        watching._undecided = [(3, {1, 2}), (5, {0, 3})]
        assert watching._narrowed({2, 3, 1})[0] == {1, 2, 3}
        watching._undecided = [(3, {1, 2})]
        assert watching._narrowed({2, 3}) == ({2, 3}, "; one of these ranks made it so")
        watching._undecided = [(3, {1, 2}), (4, {0, 1}), (7, {2, 3})]
        suspects, by = watching._narrowed({2, 3})
        assert suspects == {2} and "by the findings at steps 3, 7 this one" in by
    finally:
        watching.close()
