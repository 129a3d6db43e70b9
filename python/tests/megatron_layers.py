"""One MoE layer, Megatron-core's or UniEP's, with the same parameters, and what a forward and a backward of it give."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import uniep.megatron
from layers import relative_error, same_bits

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 64, 32, 8, 2


def config(**changes):
    given = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": INTERMEDIATE,
        "moe_router_topk": TOPK,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": dist.get_world_size(),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "bias_activation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "init_method_std": 0.1,
    }
    return TransformerConfig(**{**given, **changes})


def spec(ours, **options):
    found = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return uniep.megatron.enable(found, **options) if ours else found


def moe_layer(ours, schedule="auto", save="keep", **changes):
    """A layer of this rank, its parameters equal for both."""
    torch.manual_seed(11 + dist.get_rank())
    layer = spec(ours, schedule=schedule, save=save).submodules.mlp(config(**changes), layer_number=1)
    layer.set_layer_number(1)
    with torch.no_grad():
        router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3))
        layer.router.weight.copy_(router)
    return layer


def run_layer(layer, tokens=48, before_backward=lambda: None, **options):
    """y and gradients of one call with a random batch of this rank."""
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x = torch.randn(tokens, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(tokens, 1, HIDDEN, generator=generator).bfloat16()
    y, bias = layer(x, **options)
    assert bias is None
    before_backward()
    y.backward(dy)
    experts = layer.experts.local_experts
    gradients = [
        torch.stack([getattr(one, name).weight.grad for one in experts]) for name in ("linear_fc1", "linear_fc2")
    ]
    found = {
        "y": y.detach(),
        "dx": x.grad,
        "router": layer.router.weight.grad,
        "dw1": gradients[0],
        "dw2": gradients[1],
    }
    if experts[0].linear_fc1.bias is not None:
        for name in ("linear_fc1", "linear_fc2"):
            found[f"db of {name}"] = torch.stack([getattr(one, name).bias.grad for one in experts])
    return found


def gathered(tensor):
    """The tensor of every rank, in one list."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


def assert_close(got, expected, text=""):
    """Both results of run_layer(), of UniEP and of Megatron."""
    for name, value in got.items():
        error = relative_error(value, expected[name].double())
        assert error < 0.015, (name, error, text)


def assert_same(got, expected, text=""):
    for name, value in got.items():
        assert same_bits(value, expected[name]), (name, text)
