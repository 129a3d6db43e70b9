"""torchrun --nproc-per-node N -m uniep.pilot: docs/pilot.md"""

from __future__ import annotations

import datetime
import json
import logging
import pathlib
import shlex
import sys
import time
import traceback
import typing
import warnings
from collections.abc import Callable

from uniep.pilot import options as command_line
from uniep.pilot.world import begin, communicators, environment, high_priority_groups, prepare_environment


def _tell(rank: int) -> typing.Callable[[str], None]:
    started = time.monotonic()

    def tell(text: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    return tell


def run(options: typing.Any, write: Callable[[dict[str, typing.Any]], None]) -> dict[str, typing.Any]:
    """All parts that were asked for, as the report's content. Collective."""
    import torch.distributed as dist

    from uniep.pilot import arms as arms_module
    from uniep.pilot import preflight, sizes, text
    from uniep.pilot.parts import Output, Parts
    from uniep.pilot.training import Setting, set_up_parallelism, what_it_is
    from uniep.pilot.turns import used_bytes
    from uniep.switch import is_disabled

    device, ranks = begin(options.cpu, datetime.timedelta(minutes=30))
    tell = _tell(dist.get_rank())
    size = sizes.of_model(options.model, options.layers)
    if "uniep" in options.arms and is_disabled("the pilot can not run UniEP's arm"):
        raise ValueError(
            "UNIEP_DISABLE: 1; the arm uniep would be Megatron-core's own layer: unset it, or leave it out"
        )
    if size.experts % ranks != 0:
        raise ValueError(f"--nproc-per-node: {ranks}; must divide the {size.experts} experts of {options.model}")
    data, what = text.read(options.text)
    arms, missing = arms_module.find(options.arms, options.schedule)
    batches = text.Text(data, size.sequence, size.batch, options.seed)
    if "uniep" in options.arms and options.schedule != "auto":
        preflight.check_schedule(device, size, options.schedule)
    setting = Setting(
        size, batches, device, options.seed, cuda_graphs=options.cuda_graphs, used_bytes=used_bytes(device)
    )
    bounded = "uniep" in options.arms
    set_up_parallelism(ranks, bounded)
    report: dict[str, typing.Any] = {
        "format": 3,
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
            "cuda_graphs": options.cuda_graphs,
            "communicators": communicators(bounded),
            "high_priority_groups": high_priority_groups(bounded),
            "environment": {} if options.cpu else environment(),
        },
        "arms": {arm.name: what_it_is(setting, arm, ranks) for arm in arms},
        "missing_arms": missing,
        "missing_parts": [part for part in command_line.PARTS if part not in options.parts],
        "failed_parts": {},
    }
    for name, why in missing.items():
        tell(f"arm {name} is missing: {why}")
    Parts(options, setting, arms, report, Output(write, tell)).run()
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
    from uniep.pilot.meeting import meet

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
    if dist.get_rank() == 0:
        print(summary.words(report))
        print(f"{out / 'report.html'} and {out / 'report.json'} are written", flush=True)
    if report["failed_parts"] or "timed_out" in report:
        meet("the end")  # and no more of NCCL: what the part has left there may never end
    else:
        dist.barrier()
        dist.destroy_process_group()
    return 0 if summary.passed(report) else 1


if __name__ == "__main__":
    from uniep.pilot.leave import leave

    leave(main())
