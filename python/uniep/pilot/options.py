"""The command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from uniep.pilot.arms import NAMES, STEPS_BEFORE_GRAPHS, has_transformer_engine
from uniep.pilot.sizes import SIZES

PARTS = ("preflight", "turns", "deterministic", "bits", "kill", "curves")
# On a CPU and on GPUs, where nothing else is asked for.
_RESERVED = "0,8,16"
_DEFAULTS = {"turns": (2, 3), "steps": (8, 20), "warm": (2, 3), "bit_steps": (6, 12), "curve_steps": (40, 60)}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; a mistake ends the program with status 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m uniep.pilot",
        description="Trains a Megatron-core model with each MoE layer that is here, in turns, and writes a report.",
    )
    parser.add_argument("--model", default="tiny", help=", ".join(SIZES))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--arms", default=",".join(NAMES), help="with commas; the default is all")
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas; the default is all")
    parser.add_argument("--cpu", action="store_true", help="over gloo, without a GPU; times say nothing about GPUs")
    parser.add_argument("--text", metavar="FILE", help="bytes to train on; without it the documentation of the clone")
    parser.add_argument("--config", metavar="FILE", help="flags of your job for the preflight: JSON or a command line")
    parser.add_argument("--schedule", default="auto", help="of UniEP's arm; docs/schedule.md")
    parser.add_argument(
        "--reserve-sms",
        metavar="N,N",
        help=f"steps of UniEP with so many SMs left to NCCL; {_RESERVED} on several GPUs, else none; '' for none",
    )
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--turns", type=int, help="blocks of each arm")
    parser.add_argument("--steps", type=int, help="timed steps of a block")
    parser.add_argument("--warm", type=int, help="steps of a block before these")
    parser.add_argument(
        "--cuda-graphs",
        action="store_true",
        help="attention and MoE layers up to the experts as CUDA graphs, in all arms; needs Transformer Engine",
    )
    parser.add_argument("--deterministic-steps", type=int, help="timed steps of a block in deterministic mode")
    parser.add_argument(
        "--bit-layers",
        type=int,
        help="layers in bits and kill, whose checkpoints take 14 bytes a parameter; else two with experts at most",
    )
    parser.add_argument("--bit-steps", type=int, help="steps of the comparisons of bits, and of the job that is killed")
    parser.add_argument("--curve-steps", type=int, help="steps of the loss curves")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep turns and curves in --out as they are measured, and go on behind those of a run like this one",
    )
    parser.add_argument("--out", default="pilot", metavar="DIR", help="where report.html and report.json go")
    options = parser.parse_args(words)
    options.words = list(words) if words is not None else None
    for name, (on_cpu, on_gpu) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, on_cpu if options.cpu else on_gpu)
        least = 0 if name == "warm" else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)}; must be {least} or more")
    if options.cuda_graphs and (options.cpu or not has_transformer_engine()):
        parser.error("--cuda-graphs: needs GPUs and Transformer Engine")
    if options.cuda_graphs and options.warm <= STEPS_BEFORE_GRAPHS:
        parser.error(f"--warm: {options.warm}; must be {STEPS_BEFORE_GRAPHS + 1} or more with --cuda-graphs")
    if options.deterministic_steps is None:
        options.deterministic_steps = max(2, options.steps // 2)
    if options.deterministic_steps < 1:
        parser.error(f"--deterministic-steps: {options.deterministic_steps}; must be 1 or more")
    if options.bit_steps < 4:
        parser.error(f"--bit-steps: {options.bit_steps}; must be 4 or more, half of them before the checkpoint")
    for name in ("text", "config"):
        _check_file(parser, f"--{name}", getattr(options, name))
    options.arms = _list(parser, "--arms", options.arms, NAMES)
    options.parts = _list(parser, "--parts", options.parts, PARTS)
    if options.reserve_sms is None:
        several = not options.cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "uniep" in options.arms
        options.reserve_sms = _RESERVED if several else ""
    try:
        options.reserve_sms = [int(one) for one in options.reserve_sms.split(",") if one]
    except ValueError:
        parser.error(f"--reserve-sms: {options.reserve_sms}; must be numbers with commas, as 0,8,16")
    if options.reserve_sms and "uniep" not in options.arms:
        parser.error("--reserve-sms: needs the arm uniep")
    if options.model not in SIZES:
        parser.error(f"--model: {options.model}; legal are {', '.join(SIZES)}")
    if "uniep" not in options.arms and {"bits", "kill"} & set(options.parts):
        parser.error("--parts: bits and kill need the arm uniep")
    if "stock" not in options.arms and "curves" in options.parts:
        parser.error("--parts: curves needs the arm stock, which the others are compared with")
    return options


def _check_file(parser: argparse.ArgumentParser, name: str, file: str | None) -> None:
    if file is None:
        return
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        parser.error(f"{name}: {file}; must be a file that can be read: {error.strerror}")


def _list(parser: argparse.ArgumentParser, name: str, text: str, legal: Sequence[str]) -> list[str]:
    found = [one for one in text.split(",") if one]
    for one in found:
        if one not in legal:
            parser.error(f"{name}: {one}; legal are {', '.join(legal)}")
    if not found or len(set(found)) < len(found):
        parser.error(f"{name}: {text}; each may be there once, and there must be one")
    return found
