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


def backward_order_of_eight(uniep, sizes, schedule=None):
    """How eight ranks run backward by default, as a Schedule's text: where weight gradients run. `sizes`: H, I, E, K of the whole model,
    numbers or their text; `schedule`: what is given besides."""
    shape = sizes if isinstance(sizes, str) else ",".join(map(str, sizes))
    command = [uniep, "schedule", "--engine", "cuda", "--ranks", "8", "--shape", shape, "--direction", "backward"]
    command += ["--schedule", schedule] if schedule else []
    filled = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return f"fusion={filled['fusion']},backward.wgrad={filled['backward.wgrad']}"


def main():
    experts, path = int(sys.argv[1]), sys.argv[2]
    np.save(path, remote_ids(experts, *map(int, sys.argv[3:])))


if __name__ == "__main__":
    main()
