"""The parts of the pilot, one after the other, each into the report."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import pathlib
import shutil
import tempfile
import traceback
import typing
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from uniep import reserved_sms
from uniep.group import Group, groups
from uniep.layer_stats import record_stats
from uniep.megatron.beside import overlapped_groups
from uniep.pilot import bits, curves, forecast, kill, preflight, sizes, summary, turns
from uniep.pilot.arms import STEPS_BEFORE_GRAPHS, Arm, with_idle_sms, with_reserved_sms
from uniep.pilot.job import Job
from uniep.pilot.kept import Entry, Kept
from uniep.pilot.meeting import meet
from uniep.pilot.options import PARTS
from uniep.pilot.training import Setting, what_it_is
from uniep.pilot.world import set_deterministic

NOT_OVER = "it did not come to its end"
MOST_BIT_LAYERS = 2  # with experts, where --bit-layers does not say more: checkpoints of a whole model fill disks


class Output(typing.NamedTuple):
    """Where results go, on rank 0: the report as it is so far, and lines."""

    write: Callable[[summary.Report], None]
    tell: Callable[[str], None]


def _remove(folder: pathlib.Path) -> None:
    """On each host. When no rank reads or writes there any more."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        shutil.rmtree(folder, ignore_errors=True)


def arms_with_reserved_sms(ours: Arm, counts: list[int], beside: list[dist.ProcessGroup]) -> list[list[Arm]]:
    """UniEP's arm with other numbers of SMs for NCCL, and, where it lends them, with these idle.

    Args:
        beside: process groups whose collectives run beside layers.

    Returns:
        Arms that take turns: those that leave enough, then each of the others alone.
    """
    enough = reserved_sms.total(reserved_sms.most_ctas(one) for one in beside) or 0
    first = [ours, *(with_reserved_sms(ours, count) for count in counts if count >= enough)]
    if enough and reserved_sms.may_lend(ours.schedule or "") and all(map(reserved_sms.goes_first, beside)):
        first.insert(1, with_idle_sms(ours))
    return [first, *([with_reserved_sms(ours, count)] for count in counts if count < enough)]


class Parts:
    """What a run of the pilot does.

    Args:
        options: of the command line.
        setting, arms: what is trained, and how.
        report: has what is known before; each part adds its own.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        setting: Setting,
        arms: Sequence[Arm],
        report: summary.Report,
        output: Output,
    ) -> None:
        self.options, self.setting, self.arms, self.report = options, setting, list(arms), report
        self.write, self.tell = output.write, output.tell
        size = setting.size
        layers = options.bit_layers or min(size.layers, size.dense_layers + MOST_BIT_LAYERS)
        if layers != size.layers:
            size = sizes.of_model(options.model, layers, "--bit-layers")
        # Whose bits are told: attention's usual backward on GPUs adds in another order each time.
        self.repeatable = dataclasses.replace(setting, size=size, deterministic=True, cuda_graphs=False)
        self.folder: pathlib.Path | None = None
        self.uninterrupted: tuple[bits.Equality, list[float], str] | None = None

    def run(self) -> None:
        """Runs all parts that were asked for, and writes the report before and behind each. Collective.

        A part that fails on all ranks alike is named in the report, and the next one runs.
        """
        wanted = [part for part in PARTS if part in self.options.parts]
        if "kill" in wanted and dist.get_world_size() == 1:
            wanted.remove("kill")
            self.report["missing_parts"].append("kill: it needs two ranks or more")
        if self.options.reserve_sms:
            wanted.append("reserve_sms")
        self.report["missing_parts"] += [f"{part}: {NOT_OVER}" for part in wanted]
        try:
            if {"turns", "deterministic", "curves"} & set(wanted):  # the others are UniEP's alone
                self._leave_out_broken_arms()
            for part in wanted:
                self.write(self.report)
                why = self._run_part(part)
                self.report["missing_parts"].remove(f"{part}: {NOT_OVER}")
                if why is not None:
                    self.report["failed_parts"][part] = why
                    self.tell(f"{part} failed: {why}")
        finally:
            self.write(self.report)
            if self.folder is not None:
                _remove(self.folder)

    def _leave_out_broken_arms(self) -> None:
        """An arm that needs a library may import and yet not run; then it would take the others' part with it."""
        least = dataclasses.replace(self.setting.size, layers=self.setting.size.dense_layers + 1)
        brief = dataclasses.replace(self.setting, size=least)
        steps = STEPS_BEFORE_GRAPHS + 1 if self.setting.cuda_graphs else 1
        for arm in [one for one in self.arms if one.name not in ("stock", "uniep")]:
            tried, why = self._first_that_runs(arm, brief, steps)
            if why is None:
                self.arms[self.arms.index(arm)] = tried
                self.report["arms"][arm.name] = what_it_is(self.setting, tried, dist.get_world_size())
            else:
                self.arms.remove(arm)
                self.report["missing_arms"][arm.name] = f"its first step failed: {why}"
                self.tell(f"arm {arm.name} is missing: its first step failed: {why}")

    def _first_that_runs(self, arm: Arm, brief: Setting, steps: int) -> tuple[Arm, str | None]:
        """An arm or a plainer one instead of it; and why the last failed, if all did."""
        why = None
        tried: Arm | None = arm
        while tried is not None:
            arm = tried
            one_step = functools.partial(turns.run_block, brief, arm, turn=0, warm=0, steps=steps)
            why = self._why_failed(f"a first step of {arm.name}", one_step)
            tried = None if why is None else arm.plainer
            if tried is not None:
                self.tell(f"{arm.what}: its first step failed: {why}; now {tried.what}")
        return arm, why

    def _run_part(self, part: str) -> str | None:
        """Why the part failed on all ranks; None where it did not."""
        return self._why_failed(part, getattr(self, f"run_{part}"))

    def _why_failed(self, what: str, run: Callable[[], object]) -> str | None:
        """Why it failed on all ranks; None where it did not."""
        try:
            run()
            return None
        except Exception as error:
            if what == "preflight" and isinstance(error, ValueError):  # of the command line
                raise
            traceback.print_exc()
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            traceback.clear_frames(error.__traceback__)  # they hold models
            if not meet(f"failed in {what}"):
                raise
        for group in groups():
            group.close()
        record_stats(False)
        set_deterministic(False)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return words

    @property
    def ours(self) -> Arm:
        return next(arm for arm in self.arms if arm.name == "uniep")

    def run_preflight(self) -> None:
        size, schedule = self.setting.size, self.options.schedule
        with Group(device=self.setting.device) as group:
            needs = forecast.forecast(size, group, schedule, size.sequence * size.batch)
            found: dict[str, typing.Any] = {
                "versions": preflight.versions(),
                "fused": preflight.fused(group, size, schedule),
                "memory_mib_a_layer": [need._asdict() for need in needs],
                "flags": None,
            }
        if self.options.config is not None:
            found["flags"] = preflight.difference(preflight.read_flags(pathlib.Path(self.options.config)))
        self.report["preflight"] = found
        for name, value in {**found["versions"], **found["fused"]}.items():
            self.tell(f"{name}: {value}")
        for line in found["flags"] or []:
            self.tell(line)

    def _kept(self, part: str, sizes_of_it: Entry) -> Kept:
        """Of an earlier run of this part with the same models, arms and sizes on such a machine."""
        if not self.options.resume:
            return Kept(None, {})
        setting = {name: one for name, one in self.report["setting"].items() if name != "timed_steps_an_arm"}
        of_gpu = self.setting.device.type == "cuda"
        machine = {"gpu": torch.cuda.get_device_name() if of_gpu else None, "torch": torch.__version__}
        key = {"setting": setting, "arms": self.report["arms"], "schedule": self.options.schedule}
        key["text"] = self.setting.text.digest
        kept = Kept(pathlib.Path(self.options.out) / f"{part}.json", key | machine | sizes_of_it)
        if kept.entries:
            self.report.setdefault("of_earlier_runs", {})[part] = len(kept.entries)
            self.tell(f"{part}: {len(kept.entries)} are an earlier run's")
        return kept

    def run_turns(self) -> None:
        given = self.options
        kept = self._kept("turns", {"warm": given.warm, "steps": given.steps})
        for blocks in turns.take_turns(self.setting, self.arms, given.turns, given.warm, given.steps, self.tell, kept):
            first = blocks[: len(self.arms)]
            self.report |= {
                "table": summary.table(blocks, self.setting.size, dist.get_world_size()),
                "timeline": {block.arm: [span._asdict() for span in block.timeline] for block in first},
                "stats": [one._asdict() for block in first for one in block.stats if block.arm == "uniep"],
                "began_alike": turns.began_alike(blocks),
                "bits": {name: [one._asdict()] for name, one in bits.of_blocks(blocks).items()},
            }
            self.write(self.report)  # a run that is cut keeps the turns so far

    def run_deterministic(self) -> None:
        found, given = dataclasses.replace(self.setting, deterministic=True), self.options
        *_, again = turns.take_turns(found, self.arms, 2, given.warm, given.deterministic_steps, self.tell)
        equal = bits.of_blocks(again)
        self.report["deterministic"] = {
            name: {"step_ms": turns.interval(times)._asdict(), "bits": equal[name]._asdict()}
            for name, times in summary.times_by_arm(again).items()
        }

    def run_bits(self) -> None:
        steps = self.options.bit_steps
        shown = [bits.of_schedules(self.repeatable, self.ours, steps), self._restarted()[0]]
        if dist.get_world_size() > 1:
            shown.append(bits.of_other_batches(self.repeatable, self.ours))
        self.report.setdefault("bits", {})
        own = [one._asdict() for one in shown]
        self.report["repeatable"] = {"layers": self.repeatable.size.layers, "bits": own}
        for one in shown:
            self.tell(f"bits, {one.what}: {'equal' if one.equal else 'DIFFER'}")

    def run_curves(self) -> None:
        steps = self.options.curve_steps
        kept = self._kept("curves", {"steps": steps})
        found = curves.run_curves(self.setting, self.arms, steps, self.tell, kept)
        apart = curves.spread(found)
        self.report["curves"] = {
            "losses": {curve.name: curve.losses for curve in found},
            "spread": None if apart is None else {**apart._asdict(), "inside": apart.inside},
        }

    def run_kill(self) -> None:
        given = self.options
        _, losses, digest = self._restarted()
        text = self._shared_folder() / f"text{dist.get_rank()}"
        self.setting.text.save(text)  # the file it is from may have changed by now
        job = Job(
            given.model,
            self.repeatable.size.layers,
            str(text),
            given.seed,
            given.schedule,
            given.cpu,
            given.bit_steps,
            str(self._shared_folder()),
        )
        outcome = kill.kill_and_resume(job, given.bit_steps, losses, digest)
        self.report["kill"] = dataclasses.asdict(outcome)
        self.tell(summary.words_of_kill(self.report["kill"]))

    def run_reserve_sms(self) -> None:
        """Numbers that leave NCCL enough first. With others a step can end in a time-out, and then the run with it."""
        given, size, ranks = self.options, self.setting.size, dist.get_world_size()
        beside = [one for found in overlapped_groups().values() for one in found if one is not None]
        together = arms_with_reserved_sms(self.ours, list(dict.fromkeys(given.reserve_sms)), beside)
        for arms in together:
            note = f"{', '.join(arm.name for arm in arms)} of reserve_sms: {NOT_OVER}"
            self.report["missing_parts"].append(note)
            self.write(self.report)
            try:
                *_, blocks = turns.take_turns(self.setting, arms, given.turns, given.warm, given.steps, self.tell)
            except TimeoutError as error:
                words = " ".join(str(error).split())
                if arms is together[0] or not meet(f"a time-out of {arms[0].name}"):
                    raise
                self.report["timed_out"] = {arms[0].name: words}
                self.report["missing_parts"].remove(note)
                self.tell(f"{arms[0].name} ended in a time-out, so nothing more is run: {words}")
                return
            self.report["missing_parts"].remove(note)
            self.report.setdefault("reserve_sms", []).extend(summary.table(blocks, size, ranks))

    def _shared_folder(self) -> pathlib.Path:
        if self.folder is None:
            made: list[typing.Any] = [tempfile.mkdtemp(prefix="uniep-pilot-") if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(made)
            self.folder = pathlib.Path(made[0])
        return self.folder

    def _restarted(self) -> tuple[bits.Equality, list[float], str]:
        if self.uninterrupted is None:
            folder = self._shared_folder() / "restart"
            self.uninterrupted = bits.of_restart(self.repeatable, self.ours, self.options.bit_steps, folder)
            dist.barrier()
            _remove(folder)
        return self.uninterrupted
