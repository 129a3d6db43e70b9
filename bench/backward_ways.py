"""What the ways to run backward cost beside the plain one, in turn in one run: weight gradients added to main_grad, x dispatched
again, FC1 again (of kept rows, or recompute: of x that is dispatched again), weight gradients later, other Schedules; and the layer
over its own GEMMs. Where two GPUs are loaded as eight would be, the plain
one is that of two: on eight, layers that their links bind are "mixed" by default.

    python3 bench/backward_ways.py build/release/uniep [--as-eight | --ranks 1] [--rounds 3] [--shapes dsv3,...] [--json FILE]

--as-eight: two GPUs loaded as eight would be (compare_layers.py). --ranks 1: one GPU with the experts of one of eight ranks. Prints
one Markdown table: milliseconds of the plain backward and, of each way, the median over the rounds of its ratio to the plain one of
its round. Other numbers of GPUs have whole models. What FILE has (records.py) is not measured again.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

import numpy

import remote_routing
from records import Records, device_name
from shapes import FOUR, SHAPES

LATER = "layer and weight gradients later"
WAYS = {  # by name: what is measured, and options of its own
    "plain": ("layer", {}),
    "GEMMs": ("gemms", {}),
    "later": (LATER, {}),
    "+= main_grad": ("layer", {"--wgrad": "main_grad"}),
    "redispatch": ("layer", {"--schedule": "save.xg=redispatch"}),
    "rows": ("layer", {"--schedule": "save.z=recompute"}),
    "recompute": ("layer", {"--schedule": "save.xg=redispatch,save.z=recompute"}),
    "after": ("layer", {"--schedule-backward": "backward.wgrad=after"}),
    "none": ("layer", {"--schedule-backward": "fusion=none"}),
    "pairs": ("layer", {"--schedule-backward": "fusion=pairs"}),
    **{"mixed" if reserve == 5 else f"mixed {reserve}":
       ("layer", {"--schedule-backward": f"backward.wgrad=mixed,backward.wgrad_reserve={reserve}"}) for reserve in (0, 3, 5, 8, 11, 14)},
    "mixed +=": ("layer", {"--schedule-backward": "backward.wgrad=mixed", "--wgrad": "main_grad"}),
}


def measure(options, shape, way, routing):
    name, own = WAYS[way]
    hidden, intermediate, experts, topk = SHAPES[shape]
    if options.as_eight or options.ranks == 1:
        experts = max(experts * options.ranks // 8, topk)
    given = {"--shape": f"{hidden},{intermediate},{experts},{topk}", "--tokens": options.tokens,
             "--ranks": options.ranks, "--devices": ",".join(map(str, range(options.first, options.first + options.ranks))),
             "--repeat": options.repeat, "--only": name, **own, **({"--warm-up": options.warm_up} if options.warm_up else {})}
    if routing is not None:
        given["--routing"] = routing
        for key in {"--schedule", *own} - {"--wgrad"}:  # each slot as a row of its own
            given[key] = ",".join(filter(None, ["dispatch.dedup=off", own.get(key)]))
    command = [options.uniep, "bench", "--op", options.op, "--json", "-", *(str(word) for pair in given.items() for word in pair)]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return report["results"][0]["ms"]["median"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--as-eight", action="store_true", help="a routing that loads two GPUs as eight would be; not Mixtral's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, metavar="GPU", help="the first GPU (default 0)")
    parser.add_argument("--shapes", default=",".join(FOUR))
    parser.add_argument("--ways", default="plain,GEMMs,later,+= main_grad,redispatch")
    parser.add_argument("--op", choices=["backward", "step"], default="backward", help="step: forward and backward (default backward)")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--warm-up", type=float, default=0.15, metavar="SECONDS")
    parser.add_argument("--json")
    options = parser.parse_args()
    ways = options.ways.split(",")
    unknown = [way for way in ways if way not in WAYS] + [shape for shape in options.shapes.split(",") if shape not in SHAPES]
    if unknown or ways[0] != "plain":
        parser.error(f"--ways, --shapes: {', '.join(unknown) or ways[0]}; ways begin with plain, of {', '.join(WAYS)}; shapes are "
                     f"{', '.join(SHAPES)}")
    print("| model | plain, ms | " + " | ".join(f"{way} / plain" for way in ways[1:]) + " |")
    print("|" + "---|" * (len(ways) + 1))
    records = Records(options.json, dict(op=options.op, device=device_name(), ranks=options.ranks, as_eight=options.as_eight,
                                         tokens=options.tokens, warm_up=options.warm_up, repeat=options.repeat, turns=options.rounds,
                                         ways=ways))
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes.split(","):
            routing = None
            if options.as_eight and not shape.startswith("mixtral"):
                routing = os.path.join(folder, f"{shape}.npy")
                _, _, experts, topk = SHAPES[shape]
                numpy.save(routing, remote_routing.remote_ids(experts * options.ranks // 8, options.ranks, options.tokens, topk))
            record = records.find(shape=shape)
            if record is None:
                rounds = [{way: measure(options, shape, way, routing) for way in ways} for _ in range(options.rounds)]
                record = records.add(shape=shape, rounds=rounds)
            rounds = record["rounds"]
            plain = statistics.median(times["plain"] for times in rounds)
            ratios = {way: statistics.median(times[way] / times["plain"] for times in rounds) for way in ways[1:]}
            print(f"| {shape} | {plain:.3f} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
