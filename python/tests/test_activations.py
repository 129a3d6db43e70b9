"""Activations and places of the router's weight: the frameworks' own experts in float64, and what is refused."""

from __future__ import annotations

import importlib.util
import types
import typing

import pytest
import torch

import uniep
from layers import make_layer, relative_error, run_moe, same_bits

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 64, 48, 6, 3, 80
OSS = "swiglu:alpha=1.702,limit=7,up_offset=1"


def _config(**more: typing.Any) -> types.SimpleNamespace:
    """What the constructors of Transformers' experts read."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "moe_intermediate_size": INTERMEDIATE}
    counts = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "n_routed_experts": EXPERTS}
    return types.SimpleNamespace(**sizes, **counts, _experts_implementation="eager", moe_latent_size=None, **more)


def _oss() -> torch.nn.Module:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts(_config(swiglu_alpha=1.702, swiglu_limit=7.0))


def _nemotron() -> torch.nn.Module:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    return NemotronHExperts(_config(mlp_hidden_act="relu2"))


def _gemma() -> torch.nn.Module:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    return Gemma4TextExperts(_config(hidden_activation="gelu_pytorch_tanh"))


def _erf() -> torch.nn.Module:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts

    return Gemma4TextExperts(_config(hidden_activation="gelu"))


def _deepseek() -> torch.nn.Module:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    return DeepseekV4Experts(_config(hidden_act="silu", swiglu_limit=1.5))


def _minimax() -> torch.nn.Module:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts

    return MiniMaxM3VLExperts(_config(swiglu_alpha=1.702, swiglu_limit=2.0))


MODELS = {
    "gpt-oss": (_oss, OSS),
    "nemotron": (_nemotron, "relu2"),
    "gemma": (_gemma, "geglu_tanh"),
    "gemma with erf": (_erf, "geglu_erf"),
    "deepseek-v4": (_deepseek, "swiglu:limit=1.5"),
    "minimax-m3": (_minimax, "swiglu:alpha=1.702,limit=2,up_offset=1"),
}


def _filled(module: torch.nn.Module) -> torch.nn.Module:
    """With values that bf16 has."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(torch.randn(one.shape, generator=generator).bfloat16() / 4)
    return module


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOPK]
    return x, ids, torch.rand(TOKENS, TOPK, generator=generator).bfloat16().float(), dy


def _weights(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What moe() takes; gpt-oss's are transposed, and gate and up alternate."""
    if type(module).__name__ != "GptOssExperts":
        first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
        return first.detach(), module.down_proj.detach()
    both = module.gate_up_proj.detach().transpose(1, 2)
    return torch.cat([both[:, ::2], both[:, 1::2]], 1).contiguous(), module.down_proj.detach().transpose(1, 2)


def _biases(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """b1 and b2 as moe() takes them, if there are any."""
    if type(module).__name__ != "GptOssExperts":
        return ()
    first = module.gate_up_proj_bias.detach()
    return torch.cat([first[:, ::2], first[:, 1::2]], 1), module.down_proj_bias.detach()


def _run_theirs(module: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x, ids, probs, dy = _batch()
    module = module.to(dtype)
    own_x, own_probs = x.to(dtype).requires_grad_(), probs.to(dtype).requires_grad_()
    y = module(own_x, ids, own_probs)
    y.backward(dy.to(y.dtype))
    found = {"y": y.detach(), "dx": own_x.grad, "dprobs": own_probs.grad}
    gradients = _filled_like(module)
    names = ("dw1", "dw2", "db1", "db2")
    return {**found, **dict(zip(names, (*_weights(gradients), *_biases(gradients)), strict=False))}


def _filled_like(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its gradients as its values."""
    with torch.no_grad():
        for one in module.parameters():
            one.copy_(one.grad)
    return module


def _run_ours(module: torch.nn.Module, **options: typing.Any) -> dict[str, torch.Tensor]:
    x, ids, probs, dy = _batch()
    w1, w2 = (weight.bfloat16().contiguous().requires_grad_() for weight in _weights(module))
    x, probs = x.requires_grad_(), probs.requires_grad_()
    biases = dict(zip(("b1", "b2"), (one.bfloat16().requires_grad_() for one in _biases(module)), strict=False))
    y = uniep.moe(x, ids, probs, w1, w2, **biases, group=uniep.Group("self"), **options)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, "dw1": w1.grad, "dw2": w2.grad}
    return found | {f"d{name}": bias.grad for name, bias in biases.items()}


@pytest.mark.parametrize("model", MODELS)
def test_no_further_from_float64_than_the_models_own_layer(model):
    make, activation = MODELS[model]
    exact, theirs = (_run_theirs(_filled(make()), dtype) for dtype in (torch.float64, torch.bfloat16))
    for weight in ("output",) if model == "gpt-oss" else ("activation", "output"):  # b2 is weighted, too
        found = _run_ours(_filled(make()), activation=activation, router_weight=weight)
        assert found.keys() == exact.keys()
        for name, want in exact.items():
            own, other = (relative_error(result[name], want) for result in (found, theirs))
            assert own <= 1.05 * other, (weight, name, own, other)
            assert own < 0.04, (weight, name, own)  # at a clamp's bound a rounding decides over a gradient


def _input_weighted(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Llama 4's layer: x times the router's weight, then silu(gate) * up; by plain loops."""
    x, ids, probs, dy = _batch()
    w1, w2 = _weights(_filled(_gemma()))
    x, probs, w1, w2 = (one.to(dtype).requires_grad_() for one in (x, probs, w1, w2))
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[token] * probs[token, slot, None], w1[expert]).chunk(2, -1)
        y = y.index_add(0, token, torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert]))
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, "dw1": w1.grad, "dw2": w2.grad}


def test_weight_on_the_input():
    exact, theirs = (_input_weighted(dtype) for dtype in (torch.float64, torch.bfloat16))
    found = _run_ours(_filled(_gemma()), router_weight="input")
    for name, want in exact.items():
        own, other = (relative_error(result[name], want) for result in (found, theirs))
        assert own <= 1.05 * other, (name, own, other)


def test_backward_of_output_is_that_of_activation():
    results = [_run_ours(_filled(_gemma()), router_weight=weight) for weight in ("activation", "output")]
    assert not same_bits(results[0]["y"], results[1]["y"])
    assert all(same_bits(results[0][name], results[1][name]) for name in ("dx", "dprobs", "dw1", "dw2"))


@pytest.mark.parametrize("activation", [OSS, "geglu_erf", "relu2"])
def test_memory_modes_and_gradient_types_keep_the_bits(activation):
    make = _nemotron if activation == "relu2" else _gemma
    options = {"activation": activation, "router_weight": "input"}
    expected = _run_ours(_filled(make()), **options)
    for more in ({"save": "redispatch"}, {"save": "recompute"}, {"schedule": "fusion=none"}):
        found = _run_ours(_filled(make()), **options, **more)
        assert all(same_bits(found[name], expected[name]) for name in expected), more


def test_compiled_graphs_have_the_bits():
    w1, w2 = (one.bfloat16().contiguous() for one in _weights(_filled(_nemotron())))
    x, ids, probs, _ = _batch()
    group = uniep.Group("self")

    def run(x, ids, probs, w1, w2):
        return uniep.moe(x, ids, probs, w1, w2, group=group, activation="relu2", router_weight="output")

    assert same_bits(torch.compile(run, fullgraph=True)(x, ids, probs, w1, w2), run(x, ids, probs, w1, w2))


def test_a_module_without_a_gate():
    experts = uniep.Experts(
        num_experts=4, hidden=64, intermediate=32, group=uniep.Group("self"), activation="relu2", router_weight="output"
    )
    assert experts.gate_up_proj.shape == (4, 32, 64)
    layer = make_layer([20], experts=4)
    y = experts(layer.x[0], layer.ids[0], layer.probs[0])
    y.sum().backward()
    assert experts.gate_up_proj.grad.shape == (4, 32, 64)


def test_what_is_wrong_is_named():
    layer = make_layer([8])
    weights = layer.local(0, 1)

    def expect(text: str, *given: typing.Any, **options: typing.Any) -> None:
        with pytest.raises(ValueError, match=f"^{text}"):
            run_moe(layer, 0, given or weights, group=uniep.Group("self"), **options)

    expect("activation: 'mish'; legal are swiglu", activation="mish")
    expect("activation: None; must be a text", activation=None)
    expect("gate_limit=-7: legal are 0", activation="swiglu:gate_limit=-7")
    expect("activation: limit is 'nan'; must be a finite number", activation="swiglu:limit=nan")
    expect("router_weight: 'inside'; legal are activation, output, input", router_weight="inside")
    expect(r"w1: shape \[8, 64, 64\]; must be \[8, 32, 64\]", activation="relu2")
    gate = weights[0][:, :32].contiguous()
    with pytest.raises(ValueError, match="^w1: gate and up; activation 'silu' has no gate"):
        uniep.moe(layer.x[0], layer.ids[0], layer.probs[0], (gate, gate), weights[1], activation="silu")
