"""What test_megatron.py starts with torchrun: Megatron-core's layers beside UniEP's, with expert parallelism."""

import sys

import megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import uniep.megatron
from distributed_checks import expect_error, run_checks
from layers import Layer, reference, relative_error, same_bits, slots_of_map

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


def spec(ours):
    found = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    return uniep.megatron.enable(found) if ours else found


def moe_layer(ours, **changes):
    torch.manual_seed(11 + dist.get_rank())
    layer = spec(ours).submodules.mlp(config(**changes), layer_number=1)
    layer.set_layer_number(1)
    with torch.no_grad():
        router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3))
        layer.router.weight.copy_(router)
    return layer


def run_layer(layer, tokens=48):
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x = torch.randn(tokens, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(tokens, 1, HIDDEN, generator=generator).bfloat16()
    y, bias = layer(x)
    assert bias is None
    y.backward(dy)
    experts = layer.experts.local_experts
    gradients = [
        torch.stack([getattr(one, name).weight.grad for one in experts]) for name in ("linear_fc1", "linear_fc2")
    ]
    return {"y": y.detach(), "dx": x.grad, "router": layer.router.weight.grad, "dw1": gradients[0], "dw2": gradients[1]}


def gathered(tensor):
    """The tensor of every rank, in one list."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


def check_layer_beside_megatron_and_float64(rank, ranks):
    results = {}
    for ours in (False, True):
        layer = moe_layer(ours)
        assert isinstance(layer, uniep.megatron.UniEPMoELayer) is ours
        results[ours] = run_layer(layer)
    theirs, got = results[False], results[True]
    for name, value in got.items():
        assert relative_error(value, theirs[name].double()) < 0.015, name

    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(48, 1, HIDDEN, generator=generator).bfloat16()
    dy = torch.randn(48, 1, HIDDEN, generator=generator).bfloat16()
    with torch.no_grad():
        probs, routing_map = layer.route(x)
        ids, probs = slots_of_map(routing_map, probs, TOPK)
    experts = layer.experts.local_experts
    weights = [
        torch.cat(gathered(torch.stack([getattr(one, name).weight.detach() for one in experts])))
        for name in ("linear_fc1", "linear_fc2")
    ]
    batch = [gathered(one) for one in (x[:, 0], ids, probs, dy[:, 0])]
    exact = reference(Layer(*batch, *weights))
    local = EXPERTS // ranks
    expected = {
        "y": exact.y[rank * 48 : (rank + 1) * 48],
        "dw1": exact.dw1[rank * local : (rank + 1) * local],
        "dw2": exact.dw2[rank * local : (rank + 1) * local],
    }
    for name, value in expected.items():
        ours_error = relative_error(got[name].view(value.shape), value)
        assert ours_error <= 1.02 * relative_error(theirs[name].view(value.shape), value), name
        assert ours_error < 8e-3, name


def check_recomputation_and_schedules_change_no_bit(rank, ranks):
    expected = run_layer(moe_layer(True))
    other = moe_layer(True)
    other.uniep_experts.schedule = "fusion=none"
    recomputed = moe_layer(True, recompute_granularity="selective", recompute_modules=["moe"])
    for layer in (moe_layer(True), other, recomputed):
        for name, value in run_layer(layer).items():
            assert same_bits(value, expected[name]), name


def check_patch(rank, ranks):
    expected = run_layer(moe_layer(True))
    uniep.megatron.patch()
    try:
        layer = moe_layer(False)
    finally:
        uniep.megatron.unpatch()
    assert type(layer) is uniep.megatron.UniEPMoELayer
    for name, value in run_layer(layer).items():
        assert same_bits(value, expected[name]), name
    assert not isinstance(moe_layer(False), uniep.megatron.UniEPMoELayer)


def check_checkpoints_are_megatrons(rank, ranks):
    ours, theirs = moe_layer(True), moe_layer(False)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.sharded_state_dict()) == list(theirs.sharded_state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    expected = run_layer(ours)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.zero_grad()
    ours.load_state_dict(theirs.state_dict())
    for name, value in run_layer(ours).items():
        assert same_bits(value, expected[name]), name


def check_shared_experts_and_router_options(rank, ranks):
    for changes in (
        {"moe_shared_expert_intermediate_size": 64},
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    ):
        theirs, got = run_layer(moe_layer(False, **changes)), run_layer(moe_layer(True, **changes))
        for name, value in got.items():
            assert relative_error(value, theirs[name].double()) < 0.015, (name, changes)


def train(ours, steps=15, **changes):
    """Losses of a small GPT under Megatron's DDP, with gradients summed in fp32."""
    torch.manual_seed(1)
    given = config(init_method_std=0.02, **changes)
    model = GPTModel(
        given, spec(ours), vocab_size=128, max_sequence_length=32, position_embedding_type="rope"
    ).bfloat16()
    wrapped = DistributedDataParallel(
        given, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True), model
    )
    fused = [module for module in model.modules() if isinstance(module, uniep.megatron._Experts)]
    for module in fused:
        module.main_grad = "param"  # what gradient_accumulation_fusion does; Megatron's own layers need CUDA for it
    text = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(7 + dist.get_rank()))
    positions, mask = torch.arange(32)[None].expand(2, -1), torch.tril(torch.ones(1, 1, 32, 32)) < 0.5
    losses = []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        loss = wrapped(text, positions, mask, labels=text).float().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.15)
        losses.append(loss.item())
    return losses


def check_training(rank, ranks):
    theirs, got = train(False), train(True)
    for step, (expected, loss) in enumerate(zip(theirs, got, strict=True)):
        assert abs(loss - expected) < 0.005 * theirs[0], (step, theirs, got)
    assert got[-1] < 0.8 * got[0]
    assert train(True, recompute_granularity="selective", recompute_modules=["moe"]) == got


def check_refusals(rank, ranks):
    for name, value, text in (
        ("add_bias_linear", True, "add_bias_linear: True; UniEP's layer needs False"),
        ("activation_func", F.gelu, "needs torch.nn.functional.silu"),
        ("activation_func_clamp_value", 7.0, "activation_func_clamp_value: 7.0; UniEP's layer needs None"),
        ("gated_linear_unit", False, "gated_linear_unit: False; UniEP's layer needs True"),
        ("glu_linear_offset", 1.0, "glu_linear_offset: 1.0; UniEP's layer needs 0.0"),
        ("params_dtype", torch.float16, "params_dtype: torch.float16; UniEP's layer needs torch.bfloat16 (bf16=True)"),
        ("expert_tensor_parallel_size", 2, "expert_tensor_parallel_size: 2; UniEP's layer needs 1"),
        ("fp8", "hybrid", "fp8: 'hybrid'; UniEP's layer needs None"),
        ("fp4", "e2m1", "fp4: 'e2m1'; UniEP's layer needs None"),
        ("moe_mlp_glu_interleave_size", 32, "moe_mlp_glu_interleave_size: 32"),
        ("moe_pad_expert_input_to_capacity", True, "moe_pad_expert_input_to_capacity: True; UniEP's layer needs False"),
        ("moe_apply_probs_on_input", True, "moe_apply_probs_on_input: True"),
        ("moe_shared_expert_overlap", True, "moe_shared_expert_overlap: True"),
        ("moe_expert_rank_capacity_factor", 1.5, "moe_expert_rank_capacity_factor: 1.5; UniEP's layer needs None"),
        ("moe_single_grouped_weight", True, "moe_single_grouped_weight: True"),
        ("overlap_moe_expert_parallel_comm", True, "overlap_moe_expert_parallel_comm: True"),
        ("delay_wgrad_compute", True, "delay_wgrad_compute: True"),
        ("overlap_dispatch_backward_with_experts_wgrad", True, "overlap_dispatch_backward_with_experts_wgrad: True"),
        ("offload_modules", ["core_attn", "moe_act"], "needs modules without expert_fc1"),
        ("cuda_graph_modules", ["moe_router"], "needs modules without moe"),
    ):
        wrong = config()
        assert hasattr(wrong, name), name
        setattr(wrong, name, value)
        expect_error(ValueError, text, lambda wrong=wrong: spec(True).submodules.mlp(wrong, layer_number=1))
    expect_error(ValueError, "without a MoELayer", lambda: uniep.megatron.enable(get_gpt_layer_local_spec()))


def check_names_of_transformer_engine(rank, ranks):
    """A stand-in with the parameters of TEGroupedMLP."""
    experts = torch.nn.Module()
    experts.num_local_experts, experts.linear_fc1, experts.linear_fc2 = 2, torch.nn.Module(), torch.nn.Module()
    for expert in range(2):
        experts.linear_fc1.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.zeros(4, 2)))
        experts.linear_fc2.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.zeros(2, 2)))
    first, second = uniep.megatron.expert_weights(experts)
    assert first == [experts.linear_fc1.weight0, experts.linear_fc1.weight1]
    assert second == [experts.linear_fc2.weight0, experts.linear_fc2.weight1]
    expect_error(ValueError, "experts: Module; UniEP serves", lambda: uniep.megatron.expert_weights(torch.nn.Module()))


def set_up():
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())


if __name__ == "__main__":
    sys.exit(run_checks(globals(), set_up))
