"""Writes a routing of two or four ranks whose links carry as many results as those of eight would: of a token's slots seven in eight
go to other ranks. (Not as many rows: a row goes to a rank once, and there are fewer ranks.)

    python3 bench/remote_routing.py EXPERTS FILE.npy [RANKS [TOKENS [TOPK]]]
    build/release/uniep bench --op layer --ranks 2 --devices 0,1 --shape 2048,768,32,8 --routing FILE.npy --only layer
"""

import json
import subprocess
import sys

import numpy as np


def remote_ids(experts, ranks=2, tokens=8192, topk=8):
    """[ranks * tokens, topk] experts, random. The seven in eight are rounded, and as many as other ranks have experts at most."""
    local = experts // ranks
    remote = min(round(topk * 7 / 8), experts - local)
    if topk - remote > local:
        raise ValueError(f"{experts} experts on {ranks} ranks are too few for {topk} slots")
    random = np.random.default_rng(1)
    ids = np.empty((ranks * tokens, topk), np.int64)
    for rank in range(ranks):
        own = np.argsort(random.random((tokens, local)), axis=1)[:, :topk - remote] + rank * local
        other = np.argsort(random.random((tokens, experts - local)), axis=1)[:, :remote]
        other += np.where(other >= rank * local, local, 0)
        ids[rank * tokens:(rank + 1) * tokens] = random.permuted(np.concatenate([own, other], axis=1), axis=1)
    return ids


# What eight ranks choose otherwise than two.
ORDER = ("fusion", "comm.where", "comm.dispatch_sms", "order.experts_per_wave", "order.interleave", "order.raster", "combine.column_chunks",
         "backward.wgrad", "backward.wgrad_reserve")


def schedule_of_eight(uniep, sizes, direction, given=None):
    """What eight ranks run by default, as a Schedule's text for fewer that are loaded as eight. `sizes`: H, I, E, K of the whole model,
    numbers or their text; `given`: a Schedule's text, whose fields stay."""
    shape = sizes if isinstance(sizes, str) else ",".join(map(str, sizes))
    command = [uniep, "schedule", "--engine", "cuda", "--ranks", "8", "--shape", shape, "--direction", direction]
    command += ["--schedule", given] if given else []
    filled = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    fields = {"dispatch.dedup": "off", **{name: filled[name] for name in ORDER}}
    fields |= dict(field.split("=", 1) for field in (given or "").split(",") if field)
    return ",".join(f"{name}={value}" for name, value in fields.items())


def main():
    experts, path = int(sys.argv[1]), sys.argv[2]
    np.save(path, remote_ids(experts, *map(int, sys.argv[3:])))


if __name__ == "__main__":
    main()
