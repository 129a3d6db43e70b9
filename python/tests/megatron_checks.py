"""What test_megatron.py starts with torchrun: Megatron-core's layers beside UniEP's, with expert parallelism."""

import sys

import megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

import uniep.megatron
from distributed_checks import expect_error, run_checks
from layers import Layer, reference, relative_error, same_bits, slots_of_map
from megatron_layers import EXPERTS, HIDDEN, TOPK, assert_close, assert_same, config, gathered, moe_layer, run_layer
from uniep.megatron.experts import Experts


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
    recomputed = moe_layer(True, recompute_granularity="selective", recompute_modules=["moe"])
    for layer in (moe_layer(True), recomputed):
        assert_same(run_layer(layer), expected)
    for schedule, save in (("fusion=none", "keep"), (("fusion=pairs", "auto"), "redispatch"), ("auto", "recompute")):
        layer = moe_layer(True, schedule=schedule, save=save)
        assert_same(run_layer(layer), expected, (schedule, save))


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


class BackendLayer(torch.nn.Module):
    """A stand-in for the layer of Megatron's main branch that gives its routing to a MegakernelBackend."""

    def __init__(self, layer, **options):
        super().__init__()
        self.layer = layer
        self.backend = uniep.megatron.UniEPBackend(
            config=layer.config,
            ep_group=layer.ep_group,
            routed_experts=layer.experts,
            shared_experts=layer.shared_experts,
            num_local_experts=layer.num_local_experts,
            **options,
        )

    def forward(self, x):
        probs, routing_map = self.layer.route(x)
        return self.backend(x, probs, routing_map), None


def check_megakernel_backend(rank, ranks):
    for changes in ({}, {"moe_shared_expert_intermediate_size": 64}):
        expected = run_layer(moe_layer(True, **changes))
        inner = moe_layer(False, **changes)
        names = list(inner.state_dict())
        layer = BackendLayer(inner, save="recompute")
        assert list(layer.state_dict()) == [f"layer.{name}" for name in names]
        assert not layer.backend.sharded_state_dict()
        assert len(list(layer.backend.parameters())) == 2 * EXPERTS // ranks
        layer.router, layer.experts = inner.router, inner.experts
        got = run_layer(layer)
        if changes:  # the order in which autograd adds up dx is another one
            assert_close(got, expected, changes)
        else:
            assert_same(got, expected)
    wrong = config(moe_apply_probs_on_input=False)
    wrong.moe_apply_probs_on_input = True
    inner.config = wrong
    expect_error(ValueError, "moe_apply_probs_on_input: True; UniEP's layer needs False", lambda: BackendLayer(inner))


def check_enable_needs_a_moe_layer(rank, ranks):
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


class GroupedTensor(torch.Tensor):
    """A stand-in for Transformer Engine's: without memory of its own, around `rowwise_data`."""

    @staticmethod
    def __new__(cls, rowwise_data, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=rowwise_data.dtype, device=rowwise_data.device)

    def __init__(self, rowwise_data, shape):
        self.rowwise_data = rowwise_data

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].rowwise_data, args[0].shape)
        raise NotImplementedError(f"{function} of a grouped weight")


def check_single_grouped_weight(rank, ranks):
    """One parameter of all experts, a plain one and a stand-in for Transformer Engine's, has the bits of one each."""
    for main_grad in (False, True):
        layer = moe_layer(True)
        layer.config.gradient_accumulation_fusion = main_grad  # Megatron's own layers need a CUDA extension for it
        local = layer.experts.local_experts
        parameters = [[getattr(one, name).weight for one in local] for name in ("linear_fc1", "linear_fc2")]
        results = []
        for kind in ("each", "plain", "grouped"):
            experts = torch.nn.Module()
            experts.num_local_experts = len(local)
            made = []
            for name, weights in zip(("linear_fc1", "linear_fc2"), parameters, strict=True):
                linear = torch.nn.Module()
                values = torch.stack([weight.detach() for weight in weights])
                if kind == "each":
                    own = [torch.nn.Parameter(value.clone()) for value in values]
                    for expert, weight in enumerate(own):
                        linear.register_parameter(f"weight{expert}", weight)
                else:
                    whole = values if kind == "plain" else GroupedTensor(values.view(-1), values.shape)
                    own = [torch.nn.Parameter(whole)]
                    linear.register_parameter("weight", own[0])
                setattr(experts, name, linear)
                made.append(own)
            for weight in (*made[0], *made[1]):
                weight.main_grad = torch.zeros(weight.shape)
            module = Experts(layer.config, layer.ep_group, experts)
            assert module.count == len(local)
            generator = torch.Generator().manual_seed(9 + rank)
            x = torch.randn(40, HIDDEN, generator=generator).bfloat16().requires_grad_()
            probs = torch.rand(40, EXPERTS, generator=generator)
            y = module(x, probs, probs >= probs.topk(TOPK).values[:, -1:])
            y.backward(torch.ones_like(y))
            for weight in (*made[0], *made[1]):
                assert getattr(weight, "grad_added_to_main_grad", False) is main_grad
                assert main_grad is (not weight.grad.any())
            sums = [[one.main_grad if main_grad else one.grad for one in own] for own in made]
            sums = [torch.stack(own) if kind == "each" else own[0] for own in sums]
            results.append((y.detach(), x.grad, *sums))
        for result in results[1:]:
            assert all(same_bits(got, expected) for got, expected in zip(result, results[0], strict=True))


def set_up():
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())


if __name__ == "__main__":
    sys.exit(run_checks(globals(), set_up))
