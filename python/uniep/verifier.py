"""Verifier: finds a GPU that computes wrongly, by running a layer again elsewhere.

No schedule and no placement of experts changes a bit of a layer's results. So a call is checked by another call: on the
same inputs, under another schedule, with one expert of each rank moved to another rank. docs/verifier.md says what is
found and what is not.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import typing
from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from uniep import capture, peers, rerun
from uniep.rerun import Noted, Sums

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.group import Group
    from uniep.routes import Route

_log = logging.getLogger("uniep")
_PATIENCE = 3  # due steps that a layer and direction may stay away when it is their turn
_FEW_TILES = 4  # as memory that fails, not as a program that writes
_DIRECTIONS = ("forward", "backward")
_NO_MEMORY = "a rank has no memory for what a check needs"
_FREED = (
    "its weights or its x were freed before step(), as FSDP2 does, or Megatron in an evaluation that recomputes norms"
)
_ORDER = ("o", "y", "dprobs", "dx", "dw1", "dw2")  # rows before their sums


class Finding(typing.NamedTuple):
    """What one check found. All ranks of the group get the same.

    Attributes:
        kind: "wrong rank", "wrong rank, undecided", "memory changed", "inputs changed", "not finite", or "own bug".
        layer: of the call, as stats() names it.
        direction: of the call, "forward" or "backward".
        tensor: "y", "dx", "dprobs", "dw1", "dw2", "o" (an expert's rows on their way back), or an input.
        rank: of the group; -1: none, or not known.
        suspects: ranks, where it is undecided.
        expert: global; -1: none, as of the sum of a token's slots.
        row: of the first wrong tile, which is one row high.
        column: of the first wrong tile, the first of 128.
        message: one line that says all of this, with the GPU and its host.
        file: the inputs of all ranks, for `uniep run --tensors`; its ids beside it with .npy; or empty.
    """

    kind: str
    layer: str
    direction: str
    tensor: str
    rank: int = -1
    suspects: tuple[int, ...] = ()
    expert: int = -1
    row: int = 0
    column: int = 0
    message: str = ""
    file: str = ""


class _Evidence(typing.NamedTuple):
    """A tile of which one run says something else than the two others; run -1: all three differ."""

    tensor: str
    run: int
    candidates: tuple[int, ...]
    expert: int
    unit: int  # rank that holds the tile
    row: int
    column: int
    ambiguous: bool = False  # of two ranks, the other one against home twice


class Verifier:
    """Checks one call of one layer every N steps, forward and backward in turn. Collective: make it on all ranks.

    From its making on it is told of all calls of moe(), also of those of modules and plug-ins. Call step() at the end
    of every step, before the optimizer's. It changes no bit of a job.

    Args:
        every: steps from one check to the next, at least.
        layers: names of layers that are checked (those of `uniep.stats()`); None: all.
        budget: share of the time of all steps that checks may take, 0.001 is 0.1 %; 1 or more: no bound. The first
            check is always made.
        folder: where the inputs of a call that was found wrong are written; all ranks see it. None: nowhere.
        before_optimizer: step() is called by the first optimizer of torch's that begins a step after calls of moe(),
            on all ranks; for frameworks whose training loop is not yours.
        on_finding: called with each Finding on every rank; None: rank 0 of the group logs the message as an error.

    Attributes:
        steps: how many there have been.
        checks: how many were made. Where weights were freed before step(), or a rank has no memory, none is.
        closed: whether close() was called.
        findings: how many calls were found wrong.
        check_seconds: what the checks took.
        step_seconds: what the steps took, with the checks.

    Raises:
        ValueError: an argument is wrong, or there is another Verifier that is not closed.
    """

    def __init__(
        self,
        every: int = 100,
        layers: Sequence[str] | None = None,
        *,
        budget: float = 0.001,
        folder: str | os.PathLike[str] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
        before_optimizer: bool = False,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: {every}; must be 1 or more")
        if not budget > 0:
            raise ValueError(f"budget: {budget}; must be above 0, such as 0.001")
        if folder is not None and not os.path.isdir(folder):
            raise ValueError(f"folder: '{os.fspath(folder)}' is no folder that exists")
        if rerun.watcher is not None:
            raise ValueError("verifier: there is another one; close() it first")
        self.every, self.budget = every, budget
        self.layers = None if layers is None else tuple(layers)
        self.folder, self.on_finding = folder, on_finding
        self.steps = self.checks = self.findings = 0
        self.closed = False
        self.check_seconds = self.step_seconds = 0.0
        self._seen: list[str] = []
        self._turn = self._waited = 0
        self._next = every
        self._target: tuple[str, str] | None = None
        self._noted: Noted | None = None
        self._group: Group | None = None  # of the newest call
        self._start: tuple[torch.Tensor, torch.Tensor] | None = None
        self._lacks_start = False
        self._told: set[typing.Any] = set()
        self._undecided: list[tuple[int, set[int]]] = []
        self._begin = time.perf_counter()
        self._called = self._in_hook = False
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer) if before_optimizer else None
        rerun.watcher = self

    def close(self) -> None:
        """Ends it; another one may be made. May be called by on_finding."""
        self.closed = True
        if rerun.watcher is self:
            rerun.watcher = None
        if self._hook is not None and not self._in_hook:  # torch goes through its hooks
            self._hook.remove()
        self._noted = self._group = self._start = None

    def _before_optimizer(self, *_: object) -> None:
        if not self._called or self.closed:
            return
        self._in_hook = True
        try:
            self.step()
        finally:
            self._in_hook = False

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memory_need(self, hidden: int, intermediate: int, tokens: int, topk: int, *, backward: bool) -> int:
        """Bytes of a rank that a check takes beside the memory of its calls: one expert's weights (and gradients), the
        inputs that are held until step(), and results."""
        expert, rows = 3 * hidden * intermediate, tokens * hidden
        # weights here and on their way; gradients, what main_grad held, and that on its way
        held = expert * 2 * 2 + (expert * 4 * 3 if backward else 0)
        return held + rows * 2 * (4 if backward else 2) + tokens * topk * 16 + 3 * rerun.BYTES_AT_ONCE

    # What calls of moe() tell.

    def due(self, call: Call, direction: str) -> bool:
        self._called = True
        if call.group is not self._group:
            self._begin_with(call.group)
        if capture.is_capturing():  # replays pass by here
            return False
        name = call.name
        if (self.layers is not None and name not in self.layers) or not call.numerics.gated or call.numerics.bias:
            return False
        if name not in self._seen:
            self._seen.append(name)
        if self._noted is not None or self.steps + 1 < self._next:
            return False
        return (name, direction) == self._target if self._target is not None else direction == "forward"

    def _begin_with(self, group: Group) -> None:
        """Behind a group that was closed or aborted ranks may not agree on whose turn it is: it begins anew."""
        if self._group is not None and self._group.engine.has_ended:
            self._seen.clear()
            self._undecided.clear()
            self._told.clear()
            self._turn = self._waited = 0
            self._next = self.steps + self.every
            self._target = self._noted = None
        self._group = group

    def forget(self, group: Group) -> None:
        """What was noted of its calls: one of them has failed, and this may have been what no result is."""
        if self._noted is not None and self._noted.call.group is group:
            self._noted = None
        self._start = None

    def expert_in_turn(self, call: Call) -> int:
        local = call.shape[2] // call.group.size
        return self._turn // (2 * max(len(self._seen), 1)) % local

    @rerun.unwatched
    def after_forward(
        self,
        call: Call,
        x: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        weights: Sequence[torch.Tensor],
        route: Route,
        y: torch.Tensor,
    ) -> None:
        expert = self.expert_in_turn(call)

        def note() -> Noted:
            made = rerun.forward_sums(call, route, y)
            return rerun.note(call, "forward", x, None, ids, probs, weights, made, expert)

        self._note(call, "forward", expert, note)

    @rerun.unwatched
    def before_backward(
        self, call: Call, dw1: Sequence[torch.Tensor] | None, dw2: Sequence[torch.Tensor] | None
    ) -> None:
        self._start = None
        self._lacks_start = False
        if call.main_grad is not None and dw1 is not None and dw2 is not None:
            try:
                self._start = rerun.expert_gradients(call, dw1, dw2, self.expert_in_turn(call))
            except torch.OutOfMemoryError:
                self._lacks_start = True

    @rerun.unwatched
    def after_backward(
        self,
        call: Call,
        x: torch.Tensor,
        dy: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        weights: Sequence[torch.Tensor],
        route: Route,
        dx: torch.Tensor,
        dprobs: torch.Tensor,
        dw1: Sequence[torch.Tensor] | None,
        dw2: Sequence[torch.Tensor] | None,
    ) -> None:
        expert = self.expert_in_turn(call)

        def note() -> Noted:
            made = rerun.backward_sums(call, route, ids, dx, dprobs)
            has_gradients = dw1 is not None and dw2 is not None
            if dw1 is not None and dw2 is not None:
                made |= rerun.gradient_sums(*rerun.expert_gradients(call, dw1, dw2, expert))
            noted = rerun.note(call, "backward", x, dy, ids, probs, weights, made, expert)
            noted.gradients, noted.start = has_gradients, self._start
            noted.lacks_memory = self._lacks_start
            return noted

        self._note(call, "backward", expert, note)
        self._start = None

    def _note(self, call: Call, direction: str, expert: int, note: Callable[[], Noted]) -> None:
        """A rank without memory for what a check needs ends no call: all ranks hear of it in step()."""
        begin = time.perf_counter()
        try:
            self._noted = note()
        except torch.OutOfMemoryError:
            self._noted = Noted(call, direction, expert)
            self._noted.lacks_memory = True
        self.check_seconds += time.perf_counter() - begin

    # The end of a step.

    @rerun.unwatched
    def step(self) -> list[Finding]:
        """Ends a step, and makes the check that is due. Collective; waits for the device where a check is made.

        Call it while the step's inputs and weights are as they were: before the optimizer's step.
        """
        self.steps += 1
        self._called = False
        now = time.perf_counter()
        self.step_seconds += now - self._begin
        self._begin = now
        found: list[Finding] = []
        noted, self._noted = self._noted, None
        if noted is not None and not noted.call.group.engine.has_ended:
            self._turn += 1
            self._waited = 0
            finding = self._check(noted)
            self._choose_next(noted.call.group, time.perf_counter() - now)
            if finding is not None:
                found.append(finding)
        elif self.steps >= self._next:
            self._waited += 1
            if self._waited >= _PATIENCE:
                self._turn += 1
                self._waited = 0
        if self._seen:
            self._target = self._seen[self._turn // 2 % len(self._seen)], _DIRECTIONS[self._turn % 2]
        return found

    def _choose_next(self, group: Group, seconds: float) -> None:
        """So that checks stay within the budget with one more that takes as long; equal on all ranks."""
        self.check_seconds += seconds
        wait = self.every
        if self.budget < 1:
            each = max(self.step_seconds / self.steps, 1e-9)
            needed = (self.check_seconds + seconds) / self.budget - self.step_seconds
            wait = max(wait, math.ceil(min(needed / each, 1e15)))
        if group.size > 1:
            wait = max(peers.gather_objects(group, wait, "when the ranks verify next"))
        self._next = self.steps + wait

    def _check(self, noted: Noted) -> Finding | None:
        group = noted.call.group
        told = _gathered(group, (self.steps, *_changed_inputs(noted)))
        noted.step = told[0][0]  # behind a restart ranks may have made another number of steps
        changed = [places for _, _, places in told]
        if reasons := [reason for _, reason, _ in told if reason]:
            self._say_unchecked(noted, reasons[0])
            return None
        if any(changed):
            self.checks += 1
            return self._tell(noted, self._inputs_finding(noted, changed))
        runs, schedules = [noted.made], rerun.other_schedules(noted)
        size = group.size
        first = 1 + self._turn % (size - 1) if size > 1 else 0
        second = rerun.run_again(noted, schedules[self._turn % len(schedules)], first)
        if second is None:
            self._say_unchecked(noted, _NO_MEMORY)
            return None
        runs.append(second)
        self.checks += 1
        different = _gathered(group, rerun.differ(runs[0], runs[1]))
        if not any(different):
            bad = sum(_gathered(group, int(noted.not_finite)))
            if bad == 0:
                return None
            text = f"{bad} values of the result are NaN or infinite, the same in all runs; no rank is wrong"
            tensor = "y" if noted.direction == "forward" else "dx"
            return self._tell(noted, Finding("not finite", noted.layer, noted.direction, tensor, message=text))
        shifts = [0, first, 1 + first % (size - 1) if size > 2 else 0]
        third = rerun.run_again(noted, schedules[(self._turn + 1) % len(schedules)], shifts[2])
        if third is None:
            return self._tell(noted, _one_of_all(noted))
        runs.append(third)
        return self._tell(noted, self._judge(noted, runs, shifts, schedules))

    def _say_unchecked(self, noted: Noted, reason: str) -> None:
        key = noted.layer, reason
        if key not in self._told and noted.call.group.rank == 0:
            _log.warning("layer %s: %s; this call is not checked", noted.layer, reason)
        self._told.add(key)

    def _inputs_finding(self, noted: Noted, changed: Sequence[list[tuple[str, int, int, int, int]]]) -> Finding:
        ranks = [rank for rank, places in enumerate(changed) if places]
        places = changed[ranks[0]]
        tensor, expert, row, column, tiles = places[0]
        few = len(places) <= min(_FEW_TILES, tiles // 8)
        alone = few and len(ranks) == 1 and len({place[:2] for place in places}) == 1
        where = f"{tensor}{f' of expert {expert}' if expert >= 0 else ''}, row {row}, columns from {column} on"
        if alone:
            text = f"{where} changed in memory behind the call, where nothing may write"
            return Finding(
                "memory changed", noted.layer, noted.direction, tensor, ranks[0], (), expert, row, column, text
            )
        text = (
            f"{where} and {sum(map(len, changed)) - 1} other tiles were written behind the call; it can not be checked"
        )
        return Finding("inputs changed", noted.layer, noted.direction, tensor, -1, (), expert, row, column, text)

    def _judge(
        self, noted: Noted, runs: list[Sums], shifts: Sequence[int], schedules: Sequence[tuple[bytes, bytes]]
    ) -> Finding | None:
        group = noted.call.group
        gathered = _gathered(group, _evidence(noted, runs, shifts))
        evidence = [one for own in gathered for one in own]
        evidence.sort(key=lambda one: _ORDER.index(one.tensor))
        if any(one.ambiguous for one in evidence):
            again = rerun.run_again(noted, schedules[self._turn % len(schedules)], 1)
            repeated = again is None or any(_gathered(group, rerun.differ(runs[0], again)))
            if repeated:
                evidence = [one._replace(candidates=(0, 1)) if one.ambiguous else one for one in evidence]
        clear = [one for one in evidence if one.run >= 0]
        if not evidence:
            return None
        candidates = set(range(group.size)) if clear else set()
        for one in clear:
            candidates &= set(one.candidates)
        fields = noted.layer, noted.direction
        if not candidates:
            one = (clear or evidence)[0]
            text = f"{_where(one)} and others are wrong; a fault of the library, or of several ranks"
            return Finding("own bug", *fields, one.tensor, -1, (), one.expert, one.row, one.column, text)
        suspects, by = self._narrowed(candidates)
        if len(candidates) > 1:
            self._undecided.append((noted.step, candidates))
        one = next(one for one in clear if set(one.candidates) & suspects)
        place = one.expert, one.row, one.column
        if len(candidates) == 1:
            text = f"{_where(one)} is wrong ({len(evidence)} tiles in all); two other runs agree against it"
            return Finding("wrong rank", *fields, one.tensor, min(candidates), (), *place, text)
        text = f"{_where(one)} is wrong ({len(evidence)} tiles in all){by}"
        return Finding("wrong rank, undecided", *fields, one.tensor, -1, tuple(sorted(suspects)), *place, text)

    def _narrowed(self, candidates: set[int]) -> tuple[set[int], str]:
        """One suspect where two earlier findings or more and this one have no other in common, and what says so."""
        earlier = [(step, ranks) for step, ranks in self._undecided if ranks & candidates]
        common = candidates.intersection(*(ranks for _, ranks in earlier))
        if len(common) != 1 or len(earlier) < 2:
            return candidates, "; one of these ranks made it so"
        steps = ", ".join(str(step) for step, _ in earlier)
        return common, f"; one of several ranks made it so, and by the findings at steps {steps} this one"

    def _tell(self, noted: Noted, finding: Finding | None) -> Finding | None:
        """Gives a finding its message, once; collective."""
        if finding is None:
            return None
        group = noted.call.group
        self.findings += 1
        key = finding.kind, finding.layer, finding.direction, finding.rank, finding.suspects
        if key in self._told:
            return None
        self._told.add(key)
        names = _gathered(group, _own_name(group))
        named = (finding.rank,) if finding.rank >= 0 else finding.suspects
        who = " or ".join(f"rank {rank} ({names[rank]})" for rank in named)
        text = f"layer {finding.layer}, {finding.direction}, step {noted.step}: {finding.kind}: "
        finding = finding._replace(message=text + (f"{who}: " if who else "") + finding.message)
        if self.folder is not None and finding.kind not in ("inputs changed", "not finite"):
            name = "".join(letter if letter.isalnum() else "_" for letter in noted.layer)
            stem = os.path.join(self.folder, f"uniep-{name}-{noted.direction}-step{noted.step}")
            try:
                file = rerun.write_inputs(noted, stem)
                finding = finding._replace(file=file, message=f"{finding.message}; inputs: {file}")
            except OSError as error:  # what was found counts more
                finding = finding._replace(message=f"{finding.message}; inputs were not written: {error}")
        if self.on_finding is not None:
            self.on_finding(finding)
        elif group.rank == 0:
            _log.error("%s", finding.message)
        return finding


def _gathered(group: Group, own: typing.Any) -> list[typing.Any]:
    return peers.gather_objects(group, own, "what the ranks verified") if group.size > 1 else [own]


def _changed_inputs(noted: Noted) -> tuple[str, list[tuple[str, int, int, int, int]]]:
    """Why the call can not be checked, or "", and what changed."""
    if noted.lacks_memory:
        return _NO_MEMORY, []
    if rerun.inputs_are_freed(noted):
        return _FREED, []
    try:
        return "", rerun.changed_inputs(noted)
    except torch.OutOfMemoryError:
        return _NO_MEMORY, []


def _one_of_all(noted: Noted) -> Finding:
    """Two runs disagree, and there is no third."""
    tensor, ranks = "y" if noted.direction == "forward" else "dx", tuple(range(noted.call.group.size))
    text = "two runs disagree, and a rank has no memory for a third; one of these ranks made it so"
    return Finding("wrong rank, undecided", noted.layer, noted.direction, tensor, -1, ranks, message=text)


def _where(one: _Evidence) -> str:
    expert = f" of expert {one.expert}" if one.expert >= 0 else ""
    row = f"row {one.row}" if one.tensor in ("dw1", "dw2") else f"token {one.row} of rank {one.unit}"
    return f"{one.tensor}{expert}, {row}, columns from {one.column} on"


def _own_name(group: Group) -> str:
    host = socket.gethostname()
    if group.device.type == "cpu":
        return f"cpu engine, host {host}"
    uuid = getattr(torch.cuda.get_device_properties(group.device), "uuid", "")
    return f"GPU {group.device.index}, {rerun.serial_number(str(uuid))}, host {host}"


def _evidence(noted: Noted, runs: Sequence[Sums], shifts: Sequence[int]) -> list[_Evidence]:
    """Of this rank's tiles."""
    group = noted.call.group
    found: list[_Evidence] = []
    explained: set[tuple[int, int]] = set()
    doubted: dict[int, set[int]] = {}  # by token: experts whose rows differ in all runs
    wrong_tokens = rerun.wrong_rows(runs, "y" if noted.direction == "forward" else "dx")
    for tensor in [name for name in _ORDER if all(name in run for run in runs)]:
        for row, tile, sums in rerun.different_tiles(runs, tensor):
            run = 0 if sums[1] == sums[2] else 1 if sums[0] == sums[2] else 2 if sums[0] == sums[1] else -1
            expert = noted.expert_of(tensor, row)
            token = row // noted.call.topk
            if tensor == "o" and token not in wrong_tokens:
                continue
            place = noted.place_of(tensor, row)
            if run < 0:
                if tensor == "o":
                    doubted.setdefault(token, set()).add(expert)
                found.append(_Evidence(tensor, run, (), expert, group.rank, place, 128 * tile))
                continue
            if tensor == "dprobs":  # made by the expert's rank, kept by the token's; an unused slot has none
                hosts = {group.rank} | ({noted.host(expert, shifts[run])} if expert >= 0 else set())
            elif expert >= 0:
                hosts = {noted.host(expert, shifts[run])}
            elif (run, row) in explained:
                continue
            else:
                rows_known = all("o" in each for each in runs)
                hosts = {group.rank} | {noted.host(each, shifts[run]) for each in doubted.get(row, ())}
                hosts |= set() if rows_known else noted.hosts_of_token(row, shifts[run])
            if tensor == "o":
                explained.add((run, token))
            moved = expert >= 0 and noted.host(expert, shifts[0]) != noted.host(expert, shifts[1])
            ambiguous = run == 1 and moved and shifts[2] == 0
            found.append(_Evidence(tensor, run, tuple(sorted(hosts)), expert, group.rank, place, 128 * tile, ambiguous))
    return found
