"""torchrun --nproc-per-node N -m uniep.pilot: docs/pilot.md"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Callable

from uniep.pilot import options as command_line
from uniep.pilot.world import begin, prepare_environment


def _tell(rank: int) -> typing.Callable[[str], None]:
    started = time.monotonic()

    def tell(text: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    return tell


def _shared_folder(rank: int) -> pathlib.Path:
    import torch.distributed as dist

    given: list[typing.Any] = [tempfile.mkdtemp(prefix="uniep-pilot-") if rank == 0 else None]
    dist.broadcast_object_list(given)
    return pathlib.Path(given[0])


def run(options: typing.Any, write: Callable[[dict[str, typing.Any]], None]) -> dict[str, typing.Any]:
    """All parts that were asked for, as the report's content. Collective.

    Writes the report before the part that may end in a time-out.
    """
    import torch.distributed as dist

    from uniep.group import Group
    from uniep.pilot import arms as arms_module
    from uniep.pilot import bits, curves, forecast, kill, preflight, sizes, summary, text, turns
    from uniep.pilot.job import Job
    from uniep.pilot.training import Setting, set_up_parallelism
    from uniep.switch import is_disabled

    device, ranks = begin(options.cpu, datetime.timedelta(minutes=30))
    rank, parts = dist.get_rank(), set(options.parts)
    tell = _tell(rank)
    size = sizes.of_model(options.model, options.layers)
    if "uniep" in options.arms and is_disabled("the pilot can not run UniEP's arm"):
        raise ValueError(
            "UNIEP_DISABLE: 1; the arm uniep would be Megatron-core's own layer: unset it, or leave it out"
        )
    if size.experts % ranks != 0:
        raise ValueError(f"--nproc-per-node: {ranks}; must divide the {size.experts} experts of {options.model}")
    data, what = text.read(options.text)
    arms, missing = arms_module.find(options.arms, options.schedule)
    setting = Setting(size, text.Text(data, size.sequence, size.batch, options.seed), device, options.seed)
    set_up_parallelism(ranks)
    report: dict[str, typing.Any] = {
        "format": 1,
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "uniep.pilot", *(options.words or sys.argv[1:])]),
        "setting": {
            "model": options.model,
            "layers": size.layers,
            "layers_of_the_model": sizes.SIZES[options.model].layers,
            "ranks": ranks,
            "device": str(device.type),
            "tokens_a_rank_and_step": size.sequence * size.batch,
            "sequence": size.sequence,
            "seed": options.seed,
            "text": what,
            "timed_steps_an_arm": options.turns * options.steps,
            "transformer_engine": arms_module.has_transformer_engine(),
        },
        "arms": {arm.name: arm.what for arm in arms},
        "missing_arms": missing,
        "missing_parts": [part for part in command_line.PARTS if part not in parts],
    }
    for name, why in missing.items():
        tell(f"arm {name} is missing: {why}")
    if "preflight" in parts:
        with Group(device=device) as group:
            report["preflight"] = {
                "versions": preflight.versions(),
                "fused": preflight.fused(group, size, options.schedule),
                "memory_mib_a_layer": [
                    need._asdict()
                    for need in forecast.forecast(size, group, options.schedule, size.sequence * size.batch)
                ],
                "flags": None
                if options.config is None
                else preflight.difference(preflight.read_flags(pathlib.Path(options.config))),
            }
        for name, value in {**report["preflight"]["versions"], **report["preflight"]["fused"]}.items():
            tell(f"{name}: {value}")
        for line in report["preflight"]["flags"] or []:
            tell(line)
    blocks = []
    if "turns" in parts:
        blocks = turns.take_turns(setting, arms, options.turns, options.warm, options.steps, tell)
        report["table"] = summary.table(blocks, size, ranks)
        report["timeline"] = {block.arm: [span._asdict() for span in block.timeline] for block in blocks[: len(arms)]}
        report["stats"] = [
            one._asdict() for block in blocks[: len(arms)] for one in block.stats if block.arm == "uniep"
        ]
        report["bits"] = {name: [one._asdict()] for name, one in bits.of_blocks(blocks).items()}
    if "deterministic" in parts:
        found = dataclasses.replace(setting, deterministic=True)
        steps = max(2, options.steps // 2)
        again = turns.take_turns(found, arms, 2, options.warm, steps, tell)
        report["deterministic"] = {
            name: {"step_ms": turns.interval(times)._asdict(), "bits": bits.of_blocks(again)[name]._asdict()}
            for name, times in summary.times_by_arm(again).items()
        }
    folder = _shared_folder(rank)
    try:
        if {"bits", "kill"} & parts:
            ours = next(arm for arm in arms if arm.name == "uniep")
            restart, losses, digest = bits.of_restart(setting, ours, options.bit_steps, folder / "restart")
            if "bits" in parts:
                shown = [bits.of_schedules(setting, ours, options.bit_steps), restart]
                if ranks > 1:
                    shown.append(bits.of_other_batches(setting, ours))
                report.setdefault("bits", {}).setdefault("uniep", []).extend(one._asdict() for one in shown)
                for one in shown:
                    tell(f"bits, {one.what}: {'equal' if one.equal else 'DIFFER'}")
        if "curves" in parts:
            found_curves = curves.run_curves(setting, arms, options.curve_steps, tell)
            apart = curves.spread(found_curves)
            report["curves"] = {
                "losses": {curve.name: curve.losses for curve in found_curves},
                "spread": None if apart is None else {**apart._asdict(), "inside": apart.inside},
            }
        if "kill" in parts and ranks > 1:
            job = Job(
                options.model,
                options.layers,
                options.text,
                options.seed,
                options.schedule,
                options.cpu,
                options.bit_steps,
                str(folder),
            )
            outcome = kill.kill_and_resume(job, options.bit_steps, losses, digest)
            report["kill"] = dataclasses.asdict(outcome)
            tell(summary.words_of_kill(report["kill"]))
        elif "kill" in parts:
            report["missing_parts"].append("kill: it needs two ranks or more")
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if options.reserve_sms:
        ours = next(arm for arm in arms if arm.name == "uniep")
        counts = dict.fromkeys(options.reserve_sms)
        reserved = [ours, *(arms_module.with_reserved_sms(ours, count) for count in counts)]
        what = f"reserve_sms: {', '.join(map(str, counts))}; it did not come to its end"
        report["missing_parts"].append(what)
        write(report)
        blocks = turns.take_turns(setting, reserved, options.turns, options.warm, options.steps, tell)
        report["reserve_sms"] = summary.table(blocks, size, ranks)
        report["missing_parts"].remove(what)
    return report


def main() -> int:
    options = command_line.parse()
    prepare_environment()
    warnings.filterwarnings("ignore", module="megatron|torch.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if options.cpu:
        from uniep.pilot.cpu import stand_in_for_cuda

        stand_in_for_cuda()
    import torch.distributed as dist

    from uniep.pilot import html, summary

    out = pathlib.Path(options.out)

    def write(report: dict[str, typing.Any]) -> None:
        if dist.get_rank() != 0:
            return
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(report, indent=1))
        (out / "report.html").write_text(html.page(report))

    try:
        report = run(options, write)
    except ValueError as error:  # what the command line asks for can not be had; all ranks see the same
        print(f"uniep.pilot: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    write(report)
    if dist.get_rank() == 0:
        print(summary.words(report))
        print(f"{out / 'report.html'} and {out / 'report.json'} are written", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if summary.passed(report) else 1


if __name__ == "__main__":
    from uniep.pilot.leave import leave

    leave(main())
