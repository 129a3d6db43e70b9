"""What test_megatron.py starts: options of Megatron-core's MoE layer that UniEP serves, and its CUDA graphs."""

import dataclasses
import math
import sys

import megatron_shim  # noqa: F401

# isort: split
import megatron.core.transformer.moe.moe_layer as megatron_moe_layer
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_graph_checks
import uniep
from distributed_checks import expect_error, run_checks
from layers import relative_error, same_bits
from megatron_layers import EXPERTS, HIDDEN, TOPK, assert_close, assert_same, moe_layer, run_layer

RECOMPUTE = {"recompute_granularity": "selective"}


def check_router_options(rank, ranks):
    for changes in (
        {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_pre_softmax": True},
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    ):
        assert_close(run_layer(moe_layer(True, **changes)), run_layer(moe_layer(False, **changes)), changes)


def check_activations(rank, ranks):
    top1 = {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    for changes in (
        {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
        {"glu_linear_offset": 1.0, "activation_func_clamp_value": 0.1},
        {"activation_func": torch.nn.functional.gelu},
        {"activation_func": squared_relu, "gated_linear_unit": False},
        {"gated_linear_unit": False},
        top1,
    ):
        theirs, ours = (run_layer(moe_layer(ours, **changes)) for ours in (False, True))
        assert_close(ours, theirs, changes)


def check_biases(rank, ranks):
    """Megatron's router weights multiply FC2's bias, too."""
    oss = {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5}
    for changes in ({}, oss, {"activation_func": squared_relu, "gated_linear_unit": False}):
        layers = [moe_layer(ours, add_bias_linear=True, **changes) for ours in (False, True)]
        for layer in layers:
            generator = torch.Generator().manual_seed(20 + rank)
            with torch.no_grad():
                for one in layer.experts.local_experts:
                    for bias in (one.linear_fc1.bias, one.linear_fc2.bias):
                        bias.copy_(torch.randn(bias.shape, generator=generator))
        theirs, ours = (run_layer(layer) for layer in layers)
        assert len(ours) == 7
        assert_close(ours, theirs, changes)


def check_some_experts_frozen(rank, ranks):
    """As ESFT trains: one expert of a rank, and of another one a matrix."""
    gradients = []
    for ours, frozen in ((False, True), (True, True), (True, False)):
        layer = moe_layer(ours)
        local = layer.experts.local_experts
        linears = [getattr(one, name) for one in local for name in ("linear_fc1", "linear_fc2")]
        for which in (0, 1, 3) if frozen else ():
            linears[which].weight.requires_grad_(False)
        x = torch.randn(48, 1, HIDDEN, generator=torch.Generator().manual_seed(5 + rank)).bfloat16().requires_grad_()
        layer(x)[0].float().square().sum().backward()
        gradients.append([x.grad, *[one.weight.grad for one in linears]])
    theirs, some, every = gradients
    for which, (their, own, whole) in enumerate(zip(theirs, some, every, strict=True)):
        if which in (1, 2, 4):
            assert their is None and own is None
        else:
            assert same_bits(own, whole) and relative_error(own, their.double()) < 0.015


def check_probs_in_bf16(rank, ranks):
    """A router without moe_router_dtype gives its probabilities in the type of x."""
    theirs, got = (run_layer(moe_layer(ours, moe_router_dtype=None)) for ours in (False, True))
    assert_close(got, theirs)


def check_shared_experts_and_recomputation(rank, ranks):
    shared = {"moe_shared_expert_intermediate_size": 64}
    expected = run_layer(moe_layer(True, **shared))
    assert_close(expected, run_layer(moe_layer(False, **shared)))
    for modules in (["moe"], ["shared_experts"], ["moe_act"]):
        changes = {**shared, **RECOMPUTE, "recompute_modules": modules, "moe_grouped_gemm": True}
        assert_same(run_layer(moe_layer(True, **changes)), expected, modules)


def check_shared_experts_beside_dispatch(rank, ranks):
    """A flag of Megatron's dispatchers, which UniEP turns off: the same bits as without it."""
    for changes in ({}, {"moe_shared_expert_gate": True}):
        shared = {"moe_shared_expert_intermediate_size": 64, **changes}
        expected = run_layer(moe_layer(True, **shared))
        layer = moe_layer(True, moe_shared_expert_overlap=True, **shared)
        assert not layer.config.moe_shared_expert_overlap
        assert_same(run_layer(layer), expected)


def check_padding_to_capacity(rank, ranks):
    """Megatron fills its experts' inputs with tokens of weight 0. UniEP leaves them out."""
    for factor, policy in ((0.5, "probs"), (0.5, "position"), (1.5, "probs"), (EXPERTS / TOPK, "probs")):
        changes = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
        padded = {**changes, "moe_pad_expert_input_to_capacity": True}
        layer = moe_layer(True, **padded)
        got = run_layer(layer)
        assert_close(got, run_layer(moe_layer(False, **padded)), padded)
        assert_same(got, run_layer(moe_layer(True, **changes)), padded)
        slots = layer.token_dispatcher.routing_map.sum(1)
        assert bool((slots > TOPK).any()) or factor < 1  # more than moe() would take


def check_router_replay(rank, ranks):
    RouterReplay.clear_global_router_replay_instances()
    given = {"moe_enable_routing_replay": True}
    for changes in (given, {**given, **RECOMPUTE, "recompute_modules": ["moe"]}):
        layer = moe_layer(True, **changes)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            recorded = run_forward(layer)
        indices = RouterReplay.get_recorded_data()
        with torch.no_grad():  # another router, which would choose other experts
            layer.router.weight.copy_(layer.router.weight.flip(0))
            assert not torch.equal(run_forward(layer), recorded)
        RouterReplay.set_replay_data(indices)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        got = run_layer(layer, before_backward=replay_backward)
        assert torch.equal(layer.token_dispatcher.routing_map, recorded)
        RouterReplay.clear_global_router_replay_instances()

        theirs = moe_layer(False, **given)
        with torch.no_grad():
            theirs.router.weight.copy_(layer.router.weight)
        RouterReplay.set_replay_data(indices)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert_close(got, run_layer(theirs))
        RouterReplay.clear_global_router_replay_instances()


def replay_backward():
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


def run_forward(layer):
    """The routing of a forward of run_layer()'s batch."""
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    layer(torch.randn(48, 1, HIDDEN, generator=generator).bfloat16())
    return layer.token_dispatcher.routing_map.clone()


class Linear(torch.nn.Linear):
    """What Megatron takes from Transformer Engine for latent projections."""

    def __init__(self, size_in, size_out, *, config, init_method, bias, **_options):
        super().__init__(size_in, size_out, bias=bias, dtype=config.params_dtype)
        init_method(self.weight)

    def forward(self, x):
        return super().forward(x), None


def check_latent_moe(rank, ranks):
    before = megatron_moe_layer.HAVE_TE, megatron_moe_layer.TELinear
    megatron_moe_layer.HAVE_TE, megatron_moe_layer.TELinear = True, Linear
    try:
        for changes in ({}, {"moe_shared_expert_intermediate_size": 64}):
            theirs, ours = (moe_layer(ours, moe_latent_size=32, **changes) for ours in (False, True))
            assert ours.uniep_experts.w1_0.shape[1] == 32
            assert_close(run_layer(ours), run_layer(theirs), changes)
            pairs = ((ours.fc1_latent_proj, theirs.fc1_latent_proj), (ours.fc2_latent_proj, theirs.fc2_latent_proj))
            assert_close(*({str(i): pair[side].weight.grad for i, pair in enumerate(pairs)} for side in (0, 1)))
    finally:
        megatron_moe_layer.HAVE_TE, megatron_moe_layer.TELinear = before


def check_padding_mask(rank, ranks):
    """Megatron leaves padding tokens out of the router's losses."""
    changes = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}
    mask = torch.arange(48)[None] >= 30
    theirs, got = (run_layer(moe_layer(ours, **changes), padding_mask=mask) for ours in (False, True))
    assert_close(got, theirs)
    assert not same_bits(run_layer(moe_layer(True, **changes))["router"], got["router"])


def check_uneven_sequence_lengths(rank, ranks):
    for lengths in ([48 + 16 * one for one in range(ranks)], [80] + [17] * (ranks - 1)):
        theirs, got = (run_layer(moe_layer(ours), tokens=lengths[rank]) for ours in (False, True))
        assert_close(got, theirs, lengths)
    # Megatron's router takes no empty sequence; the experts do.
    experts = moe_layer(True).uniep_experts
    x = torch.randn(0 if rank == 0 else 40, HIDDEN).bfloat16().requires_grad_()
    routing_map = torch.arange(EXPERTS).expand(len(x), -1) < TOPK
    experts(x, routing_map.float() / TOPK, routing_map).sum().backward()
    assert x.grad.shape == x.shape
    assert bool(experts.w1_0.grad.any()) == (rank == 0 and ranks > 1)


def check_rank_capacity_factor_is_a_capacity(rank, ranks):
    if "moe_expert_rank_capacity_factor" not in {field.name for field in dataclasses.fields(TransformerConfig)}:
        return
    given = {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "use_transformer_engine_op_fuser": True,
    }
    expected = run_layer(moe_layer(True))
    generous = {**given, "moe_expert_rank_capacity_factor": float(ranks)}
    assert_same(run_layer(moe_layer(True, **generous)), expected)
    tight = moe_layer(True, **given, moe_expert_rank_capacity_factor=0.25)
    local = EXPERTS // ranks
    rows = math.ceil(4000 * TOPK * 0.25 / 128) * 128 + 128 * local
    expect_error(uniep.CapacityError, f"capacity: {rows} rows", lambda: run_layer(tight, tokens=4000))
    assert_same(run_layer(tight), expected)  # the group goes on
    text = "capacity rows: "
    if ranks > 1:
        expect_error(ValueError, text, lambda: run_layer(tight, tokens=4000 if rank == 0 else 2000))


def check_errors_of_a_step_come_before_the_optimizer(rank, ranks):
    """As an overflow on GPUs does, which the call itself does not wait for."""
    with uniep.Group("self", workers=3) as group:
        waits = []

        def synchronize():
            waits.append(len(waits))
            if len(waits) == 2:
                raise uniep.CapacityError("an overflow")

        group.synchronize = synchronize
        experts = moe_layer(True).uniep_experts
        experts._group = lambda device: group
        experts.ep_group, experts.count = None, EXPERTS // ranks
        x = torch.randn(8, HIDDEN).bfloat16()
        routing_map = torch.arange(EXPERTS // ranks).expand(len(x), -1) < TOPK
        weight = torch.nn.Parameter(torch.ones(2))
        optimizers = [torch.optim.SGD([weight], lr=1.0) for _ in range(2)]

        def step(factor):
            experts.capacity_factor = factor
            experts(x, routing_map.float() / TOPK, routing_map)
            weight.grad = torch.ones(2)
            for optimizer in optimizers:
                optimizer.step()

        step(None)
        assert not waits
        step(8.0)
        assert len(waits) == 1 and weight[0] == -3
        expect_error(uniep.CapacityError, "an overflow", lambda: step(8.0))
        assert len(waits) == 2 and weight[0] == -3
        step(None)
        assert len(waits) == 2


def check_deterministic_mode(rank, ranks):
    expected = run_layer(moe_layer(True))
    torch.use_deterministic_algorithms(True)  # which also fills memory with NaN
    try:
        for changes in ({}, {**RECOMPUTE, "recompute_modules": ["moe"]}):
            assert_same(run_layer(moe_layer(True, deterministic_mode=True, **changes)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def set_up():
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())


if __name__ == "__main__":
    sys.exit(run_checks({**globals(), **vars(megatron_graph_checks)}, set_up))
