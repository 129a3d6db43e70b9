"""What experts compute, forward and backward, as a user would write it: grouped GEMMs of torch and one compiled function for all that
lies between two of them. Rows are [R, H] in expert order, `ends` [experts] says where each expert's end, `experts` [R] whose each is.
"""

import collections

import torch

BF16 = torch.bfloat16
# Of a layer: w1, w2, and where there are biases b1 and b2. Of a batch of rows: ends, their experts, their router weights.
Weights = collections.namedtuple("Weights", "w1 w2 b1 b2", defaults=(None, None))
Rows = collections.namedtuple("Rows", "ends experts probs")


@torch.compile(dynamic=True)
def swiglu(z, probs):
    gate, up = z.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]).to(BF16)


@torch.compile(dynamic=True)
def swiglu_gradient(z, probs, da):
    gate, up = z.float().chunk(2, -1)
    da = da.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dprobs = (da * silu * up).sum(-1)
    da = da * probs[:, None]
    dgate = da * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat([dgate, da * silu], -1).to(BF16), dprobs


@torch.compile(dynamic=True)
def relu2(z, probs):
    return (torch.relu(z.float()).square() * probs[:, None]).to(BF16)


@torch.compile(dynamic=True)
def relu2_gradient(z, probs, da):
    positive, da = torch.relu(z.float()), da.float()
    return (2 * positive * da * probs[:, None]).to(BF16), (da * positive.square()).sum(-1)


ALPHA, LIMIT = 1.702, 7.0


@torch.compile(dynamic=True)
def limited_swiglu(z, b1, experts):
    gate, up = (z.float() + b1[experts].float()).chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1)).to(BF16)


@torch.compile(dynamic=True)
def limited_swiglu_gradient(z, b1, experts, da):
    gate, up = (z.float() + b1[experts].float()).chunk(2, -1)
    da, open_gate, open_up = da.float(), gate <= LIMIT, up.abs() <= LIMIT
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    sigmoid = torch.sigmoid(ALPHA * gate)
    dgate = da * (up + 1) * sigmoid * (1 + ALPHA * gate * (1 - sigmoid))
    return torch.cat([dgate * open_gate, da * gate * sigmoid * open_up], -1).to(BF16)


@torch.compile(dynamic=True)
def weighed(o, b2, rows_experts, probs):
    return ((o.float() + b2[rows_experts].float()) * probs[:, None]).to(BF16)


@torch.compile(dynamic=True)
def weighed_gradient(o, b2, rows_experts, probs, dy):
    dy = dy.float()
    return (dy * probs[:, None]).to(BF16), (dy * (o.float() + b2[rows_experts].float())).sum(-1)


def multiply(rows, weights, ends):
    return torch._grouped_mm(rows, weights, offs=ends)


def sums_of_experts(rows, ends):
    """[R, C] -> [experts, C]: by a GEMM, which is faster than adding rows up in memory."""
    ones = torch.zeros(rows.size(0), 16, device=rows.device, dtype=BF16)
    ones[:, 0] = 1
    return multiply(ones.t(), rows, ends)[:, 0]


class ActivationOfProducts:
    """The router's weight multiplies the activation, and there are no biases."""

    bias = False

    def __init__(self, halves, activate, gradient):
        self.halves, self.activate, self.gradient = halves, activate, gradient

    def forward(self, weights, rows, xg):
        """Rows for the combine, and what backward needs."""
        z = multiply(xg, weights.w1.transpose(1, 2), rows.ends)
        a = self.activate(z, rows.probs)
        return multiply(a, weights.w2.transpose(1, 2), rows.ends), (xg, z, a)

    def backward(self, weights, rows, saved, dyg):
        """dxg, dprobs, and gradients of weights."""
        xg, z, a = saved
        da = multiply(dyg, weights.w2, rows.ends)
        dw2 = multiply(dyg.t(), a, rows.ends)
        dz, dprobs = self.gradient(z, rows.probs, da)
        dxg = multiply(dz, weights.w1, rows.ends)
        return dxg, dprobs, multiply(dz.t(), xg, rows.ends), dw2


class LimitedSwigluWithBiases:
    """gpt-oss: the router's weight multiplies the expert's output, bias included."""

    bias = True
    halves = 2

    def forward(self, weights, rows, xg):
        z = multiply(xg, weights.w1.transpose(1, 2), rows.ends)
        a = limited_swiglu(z, weights.b1, rows.experts)
        o = multiply(a, weights.w2.transpose(1, 2), rows.ends)
        return weighed(o, weights.b2, rows.experts, rows.probs), (xg, z, a, o)

    def backward(self, weights, rows, saved, dyg):
        xg, z, a, o = saved
        do, dprobs = weighed_gradient(o, weights.b2, rows.experts, rows.probs, dyg)
        da = multiply(do, weights.w2, rows.ends)
        dw2, db2 = multiply(do.t(), a, rows.ends), sums_of_experts(do, rows.ends)
        dz = limited_swiglu_gradient(z, weights.b1, rows.experts, da)
        dxg = multiply(dz, weights.w1, rows.ends)
        return dxg, dprobs, multiply(dz.t(), xg, rows.ends), dw2, sums_of_experts(dz, rows.ends), db2


FORMULAS = {
    "swiglu": ActivationOfProducts(2, swiglu, swiglu_gradient),
    "relu2": ActivationOfProducts(1, relu2, relu2_gradient),
    "gpt-oss": LimitedSwigluWithBiases(),
}
# The same for `uniep bench`.
OPTIONS = {
    "swiglu": [],
    "relu2": ["--activation", "relu2"],
    "gpt-oss": ["--activation", f"swiglu:alpha={ALPHA},limit={LIMIT:g},up_offset=1", "--router-weight", "output", "--bias"],
}
