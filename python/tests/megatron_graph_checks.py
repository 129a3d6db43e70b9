"""CUDA graphs of Megatron-core that end before the experts, without a GPU; megatron_option_checks.py runs these.

Megatron's own code captures and replays; only the graph is a stand-in, which runs what was captured again as if it were
being captured. So what a graph returns, and how a layer goes on from there, is Megatron's.
"""

import contextlib

import megatron_shim  # noqa: F401

# isort: split
import torch
from megatron.core.tensor_parallel import random as recomputation
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import cuda_graphs, enums
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron_layers import HIDDEN, assert_same, config, spec

# Of Megatron-core 0.17.1 the name is another one.
MODULES = getattr(enums, "CudaGraphModule", None) or enums.CudaGraphScope
FIELD = "cuda_graph_modules" if hasattr(enums, "CudaGraphModule") else "cuda_graph_scope"
SHARED = {"moe_shared_expert_intermediate_size": 64}


@contextlib.contextmanager
def capturing():
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


def transformer_layer(kind=TransformerLayer, graphs=None, modules=(), **changes):
    model_parallel_cuda_manual_seed(7)
    torch.manual_seed(17)
    given = config(**changes)
    if graphs is not None:
        given.cuda_graph_impl = graphs
        setattr(given, FIELD, [MODULES[one] for one in modules])
    found = spec(True)
    found.module = kind
    return build_module(found, config=given, layer_number=1)


def run(layer, call, batches=2):
    """Outputs, and gradients of x and of all parameters, of a few batches."""
    found = {}
    for batch in range(batches):
        generator = torch.Generator().manual_seed(30 + batch)
        x = torch.randn(16, 2, HIDDEN, generator=generator).bfloat16().requires_grad_()
        y, _ = call(x)
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
        found |= {f"y {batch}": y.detach(), f"dx {batch}": x.grad}
    found |= {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}
    assert len(found) > 10
    return found


def replayed(layer, ends):
    """Calls of the layer as Megatron replays what Transformer Engine has captured. `ends`: outputs of each replay."""

    def graph(x):
        with capturing():
            outputs = layer._te_cuda_graph_capture(x, attention_mask=None)
        ends.append(len(outputs))
        return outputs

    layer.cuda_graphs, layer.cuda_graph_manual_hooks = [graph], []
    # Megatron's own asks Transformer Engine for a mask.
    layer._get_te_cuda_graph_replay_args = lambda x, attention_mask=None: ((x,), {})
    return lambda x: layer._te_cuda_graph_replay(x, attention_mask=None)


def check_graphs_of_transformer_engine(rank, ranks):
    for changes, shared in (({}, 0), (SHARED, 1)):
        eager = transformer_layer(**changes)
        expected = run(eager, lambda x, layer=eager: layer(x, attention_mask=None))
        for modules in (
            ["moe_router"],
            ["moe_router", "moe_preprocess"],
            ["attn", "moe_router"],
            ["attn", "moe_router", "moe_preprocess"],
        ):
            ends = []
            layer = transformer_layer(graphs="transformer_engine", modules=modules, **changes)
            assert_same(run(layer, replayed(layer, ends)), expected, (modules, changes))
            # x, probabilities and the map; the residual; what shared experts give.
            assert ends == [4 + shared] * 2, (ends, modules)


@contextlib.contextmanager
def recomputing_without_transformer_engine():
    """Of what frees an output and computes it again, that which needs Transformer Engine or compiles an extension."""
    kind = recomputation.CheckpointWithoutOutput
    begin, share = kind.__init__, getattr(recomputation, "_get_share_storage", None)

    def without_fp8(self, *_given, **_named):
        begin(self)
        self.fp8 = False

    def copy(output, computed):
        output.untyped_storage().resize_(computed.untyped_storage().nbytes())
        with torch.no_grad():
            output.untyped_storage().copy_(computed.untyped_storage())

    kind.__init__ = without_fp8
    if share is not None:
        recomputation._get_share_storage = lambda: copy
    try:
        yield
    finally:
        kind.__init__ = begin
        if share is not None:
            recomputation._get_share_storage = share


def check_graphs_beside_a_norm_that_runs_again(rank, ranks):
    """Megatron frees the norm's output behind the graph that ends with the rows for the experts."""
    eager = transformer_layer()
    expected = run(eager, lambda x: eager(x, attention_mask=None))
    again = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with recomputing_without_transformer_engine():
        for modules in ([], ["moe_router"], ["moe_router", "moe_preprocess"]):
            layer = transformer_layer(graphs="transformer_engine" if modules else None, modules=modules, **again)
            call = replayed(layer, []) if modules else lambda x, layer=layer: layer(x, attention_mask=None)
            assert_same(run(layer, call), expected, modules)
            assert layer.recompute_pre_mlp_layernorm == (modules != ["moe_router"]), modules


def check_graphs_of_megatron(rank, ranks):
    """cuda_graph_impl="local": the router, the experts and what is behind them are three calls of the layer."""
    eager = transformer_layer(**SHARED)
    expected = run(eager, lambda x: eager(x, attention_mask=None))
    layer = transformer_layer(MoETransformerLayer, **SHARED)
    steps = []
    for name in ("_forward_mlp_router", "_forward_mlp_expert_compute", "_forward_mlp_postprocess"):
        whole = getattr(layer, name)
        setattr(layer, name, lambda *given, n=name, f=whole, **named: (steps.append(n), f(*given, **named))[1])
    layer.use_partial_cudagraphs, layer.moe_layer_recompute = True, False
    layer._router_dtoh_event = torch.cuda.Event()
    assert_same(run(layer, lambda x: layer(x, attention_mask=None)), expected)
    assert steps == ["_forward_mlp_router", "_forward_mlp_expert_compute", "_forward_mlp_postprocess"] * 2
