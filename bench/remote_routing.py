"""Writes a routing of two or four ranks whose links carry as many results as those of eight would: of a token's 8 slots
7 go to other ranks. (Not as many rows: a row goes to a rank once, and there are fewer ranks.)

    python3 bench/remote_routing.py EXPERTS FILE.npy [RANKS [TOKENS]]
    build/release/uniep bench --op layer --ranks 2 --devices 0,1 --shape 2048,768,32,8 --routing FILE.npy --only layer
"""

import sys

import numpy as np

TOPK = 8


def main():
    experts, path = int(sys.argv[1]), sys.argv[2]
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    tokens = int(sys.argv[4]) if len(sys.argv) > 4 else 8192
    local = experts // ranks
    random = np.random.default_rng(1)
    ids = np.empty((ranks * tokens, TOPK), np.int64)
    for rank in range(ranks):
        own = random.integers(0, local, (tokens, 1)) + rank * local
        other = np.argsort(random.random((tokens, experts - local)), axis=1)[:, :TOPK - 1]
        other += np.where(other >= rank * local, local, 0)
        ids[rank * tokens:(rank + 1) * tokens] = random.permuted(np.concatenate([own, other], axis=1), axis=1)
    np.save(path, ids)


if __name__ == "__main__":
    main()
