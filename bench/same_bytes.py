"""Whether whole models' layers give the same bytes, forward and backward, with all ranks in one process, with a process a rank, and
on one rank that has all tokens, by the checksums that `uniep run` prints.

    python3 bench/same_bytes.py build/release/uniep --ranks 8 [--shapes dsv3/H,I,E,K/...] [--one-rank qwen3-30b] [--tokens 8192]

Prints a line a shape and way. --one-rank: shapes that fit on one GPU with the tokens of all ranks; '' for none. --forward: shapes
without backward, as processes send each other their results, and dsv3's weight gradients are 22 GB. Exit status 1 where a tensor
differs.
"""

import argparse
import json
import subprocess


def checksums(options, shape, ranks, tokens, *more):
    command = [options.uniep, "run", "--engine", options.engine, "--shape", shape, "--ranks", str(ranks), "--tokens", str(tokens),
               "--json", "-", *([] if shape in options.forward.split("/") else ["--backward"]), *more]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["checksum"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("uniep", help="the program `uniep`")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--shapes", default="qwen3-30b/qwen3-235b/mixtral/dsv3")
    parser.add_argument("--one-rank", default="qwen3-30b/qwen3-235b", metavar="SHAPES")
    parser.add_argument("--forward", default="dsv3", metavar="SHAPES")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--engine", choices=("cuda", "cpu"), default="cuda", help="cpu has no processes: to try the program")
    options = parser.parse_args()
    different = False
    for shape in options.shapes.split("/"):
        devices = ["--devices", ",".join(map(str, range(options.ranks)))] if options.engine == "cuda" else []
        expected = checksums(options, shape, options.ranks, options.tokens, *devices)
        ways = {}
        if options.engine == "cuda":
            ways["a process a rank"] = (options.ranks, options.tokens, "--launch", "processes")
        if shape in options.one_rank.split("/"):
            ways["one rank"] = (1, options.ranks * options.tokens)
        for name, way in ways.items():
            got = checksums(options, shape, *way)
            wrong = [tensor for tensor in expected if got[tensor] != expected[tensor]]
            different |= bool(wrong)
            print(f"{shape}, {name}: " + (f"other bytes in {', '.join(wrong)}" if wrong else f"the same {', '.join(expected)}"), flush=True)
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
