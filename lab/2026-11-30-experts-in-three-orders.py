"""Routing of two ranks as remote_routing.py's, of a token's eight slots seven go to the other rank, with experts of a rank chosen in
proportion to (i + 1)^-s, at most once a token. first: as they stand; last: the other way round; mixed: shuffled."""
import sys
import numpy as np
experts, tokens, s, order, seed, path = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6]
local, topk = experts // 2, 8
rng = np.random.default_rng(seed)
w = np.arange(1, local + 1) ** -s
perm = rng.permutation(local)
w = {"first": w, "last": w[::-1], "mixed": w[perm]}[order]

def share(k):
    p = k * w / w.sum()
    for _ in range(50):
        over = p >= 1
        rest = k - over.sum()
        p = np.where(over, 1.0, rest * w / w[~over].sum()) if (~over).any() else p
        if not (p > 1 + 1e-9).any(): break
    return p

def draw(k):
    # systematic sampling in an order of its own a token: exactly k, each with its share
    p = share(k)
    out = np.empty((tokens, k), np.int64)
    for t in range(tokens):
        at = rng.permutation(local)
        c = np.concatenate([[0], np.cumsum(p[at])])
        u = rng.random() + np.arange(k)
        hit = np.searchsorted(c, u, side="right") - 1
        hit = np.minimum(hit, local - 1)
        got = np.unique(at[hit])
        while len(got) < k:
            got = np.unique(np.append(got, rng.integers(local)))
        out[t] = got[:k]
    return out

ids = np.concatenate([np.concatenate([draw(1) + r * local, draw(7) + (1 - r) * local], axis=1) for r in range(2)])
ids = rng.permuted(ids, axis=1)
np.save(path, ids)
n = np.bincount(ids.ravel(), minlength=experts)
print(order, s, "rows of an expert", n.min(), n.max(), "a rank", n[:local].sum())
