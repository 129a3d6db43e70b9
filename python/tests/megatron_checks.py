"""What test_megatron.py starts: Megatron-core's layers beside UniEP's, with expert parallelism."""

import copy
import functools
import gc
import logging
import math
import sys
import types

import megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

import uniep.megatron
from distributed_checks import disabled, expect_error, run_checks
from layers import Layer, reference, relative_error, same_bits, slots_of_map
from megatron_layers import (
    EXPERTS,
    HIDDEN,
    TOPK,
    assert_close,
    assert_same,
    config,
    gathered,
    moe_layer,
    run_layer,
    spec,
)
from uniep import rerun, trials
from uniep.layer_stats import name_layer
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


def check_unpatch_gives_megatrons_init_back(rank, ranks):
    def spec_of_module():
        return types.SimpleNamespace(submodules=types.SimpleNamespace(mlp=ModuleSpec(module=MoELayer)))

    gc.collect()  # specs of other checks
    uniep.megatron.unpatch()
    theirs = MoELayer.__init__
    assert theirs.__module__ != "uniep.megatron" and not hasattr(theirs, "__wrapped__")
    for _ in range(2):
        uniep.megatron.patch()
        uniep.megatron.patch()
        assert MoELayer.__init__ is not theirs
        uniep.megatron.unpatch()
        assert MoELayer.__init__ is theirs
    enabled = uniep.megatron.enable(spec_of_module())
    copied = copy.deepcopy(enabled)
    del enabled
    gc.collect()
    uniep.megatron.unpatch()
    assert MoELayer.__init__ is not theirs  # the copy needs it
    assert copied.submodules.mlp.params["uniep_options"]["save"] == "keep"
    del copied
    gc.collect()
    uniep.megatron.unpatch()
    assert MoELayer.__init__ is theirs
    uniep.megatron.patch()
    ours = MoELayer.__init__

    def around(self, *arguments, **keywords):
        ours(self, *arguments, **keywords)

    MoELayer.__init__ = around
    try:
        uniep.megatron.unpatch()
        uniep.megatron.patch()
        assert MoELayer.__init__ is around  # somebody else's stays, and is not called by what it calls
        assert type(moe_layer(False)) is uniep.megatron.UniEPMoELayer
    finally:
        MoELayer.__init__ = ours
        uniep.megatron.unpatch()
    assert MoELayer.__init__ is theirs


class OwnLayer(MoELayer):
    """A subclass of somebody else's."""


def check_patch_says_what_it_leaves(rank, ranks):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("uniep").addHandler(handler)
    uniep.megatron.patch()
    try:
        submodules = spec(False).submodules.mlp
        given = submodules.keywords if isinstance(submodules, functools.partial) else {}
        submodules = given.get("submodules", getattr(submodules, "submodules", None))
        layers = [kind(config(), submodules=submodules) for kind in (OwnLayer, OwnLayer, MoELayer)]
    finally:
        uniep.megatron.unpatch()
        logging.getLogger("uniep").removeHandler(handler)
    assert [type(layer) for layer in layers] == [OwnLayer, OwnLayer, uniep.megatron.UniEPMoELayer]
    assert [text for text in records if "stays" in text] == [
        "OwnLayer: stays Megatron's; patch() takes MoELayer itself alone"
    ]


def check_layers_get_process_groups(rank, ranks):
    """And whether they are of multi-token prediction: from Megatron's layer around them."""
    given = ProcessGroupCollection.use_mpu_process_groups()
    layer = build_module(spec(True), config=config(), layer_number=1, pg_collection=given, is_mtp_layer=True).mlp
    assert type(layer) is uniep.megatron.UniEPMoELayer
    assert layer.uniep_experts.collection is given and layer.is_mtp_layer


def check_one_flag_verifies(rank, ranks):
    """Before an optimizer's first step behind the layers, and with the same results."""

    def weights_after_steps():
        layer = moe_layer(False)
        layer.set_layer_number(7)
        optimizers = [torch.optim.SGD(part, lr=0.1) for part in ([*layer.experts.parameters()], [layer.router.weight])]
        for _ in range(3):
            run_layer(layer)
            for optimizer in optimizers:
                optimizer.step()
        return [weight.detach().clone() for weight in layer.parameters()]

    results = []
    for verify in (0, 1):
        uniep.megatron.patch(verify=verify)
        if verify:
            rerun.watcher.budget = 1
        try:
            results.append(weights_after_steps())
            verifier = rerun.watcher
            assert (verifier is not None) is bool(verify)
        finally:
            uniep.megatron.unpatch()
    try:
        assert (verifier.steps, verifier.checks, verifier.findings) == (3, 3, 0)
        assert verifier._seen == ["layer 7"]
    finally:
        verifier.close()
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)
    expect_error(ValueError, "verify: -1", lambda: uniep.megatron.patch(verify=-1))


def check_one_flag_tunes(rank, ranks):
    """Up to a step, by the optimizer's, and with the same weights."""

    def weights_after_steps():
        layer = moe_layer(False)
        layer.set_layer_number(7)
        optimizers = [torch.optim.SGD(part, lr=1e-5) for part in ([*layer.experts.parameters()], [layer.router.weight])]
        for _ in range(6):
            run_layer(layer)
            for optimizer in optimizers:
                optimizer.step()
        return [weight.detach().clone() for weight in layer.parameters()]

    results = []
    for until in (0, 6):
        uniep.megatron.patch(tune_until=until)
        if until:
            trials.active._settings["budget"] = 1
        try:
            results.append(weights_after_steps())
        finally:
            uniep.megatron.unpatch()
    with trials.active as tuner:
        assert tuner.frozen and tuner._groups[0].steps == 6
        assert tuner.spent.lost_ms > 0  # candidates were checked
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)
    expect_error(ValueError, "tune_until: -1", lambda: uniep.megatron.patch(tune_until=-1))


def check_uniep_disable_gives_megatrons_layer(rank, ranks):
    """With the same names, parameters and results; and what UniEP would refuse is built."""
    theirs = moe_layer(False)
    expected = run_layer(theirs)
    ours, make = moe_layer(True), spec(True).submodules.mlp
    with disabled():
        layers = [moe_layer(True), make(config(), layer_number=1)]
        uniep.megatron.patch()
        try:
            layers.append(moe_layer(False))
        finally:
            uniep.megatron.unpatch()
        assert all(getattr(layer, "uniep_experts", None) is None for layer in layers)
        for layer in layers:
            assert list(layer.state_dict()) == list(ours.state_dict())
            layer.load_state_dict(ours.state_dict())
            layer.set_layer_number(1)
            assert_same(run_layer(layer), expected)
        moe_layer(True, add_bias_linear=True)
        expect_error(ValueError, "UNIEP_DISABLE: 1; there is no layer of Megatron's", lambda: BackendLayer(theirs))
    ours.load_state_dict(layers[0].state_dict())
    assert isinstance(ours, uniep.megatron.UniEPMoELayer)
    with disabled("yes"):
        expect_error(ValueError, "UNIEP_DISABLE: 'yes'; legal are 1, 0 and empty", lambda: moe_layer(True))


class Writer:
    """As TensorBoard's."""

    def __init__(self):
        self.entries = {}

    def add_scalar(self, name, value, iteration):
        self.entries[name] = (value, iteration)


def check_stats_of_all_ranks(rank, ranks):
    """Of a layer that all have, of layers that one rank has, as of a pipeline's stages, and of one that none has."""
    layers = [moe_layer(True, schedule="fusion=layer") for _ in range(3)]
    layers[1].set_layer_number(2 + rank)
    layers[2].is_mtp_layer = True
    layers[2].set_layer_number(1)
    uniep.record_stats(timed_every=1)
    writer = Writer()
    try:
        for layer in layers:
            run_layer(layer)
        found = uniep.stats()
        logged = uniep.megatron.log_stats(2 + ranks, 7, writer if rank == 0 else None, mtp_layers=1)
    finally:
        uniep.record_stats(False)
    names = [(one.layer, one.direction) for one in found]
    kinds = ("layer 1", f"layer {2 + rank}", "mtp 1")
    assert names == [(layer, direction) for layer in kinds for direction in ("forward", "backward")]
    shares = torch.tensor([gathered(one.rows) for one in found]).double()
    assert (shares.sum(1) == 48 * TOPK * ranks).all()  # every token has its K experts
    for one, rows in zip(found, shares, strict=True):
        assert one.rows_max_over_mean == (rows.max() / rows.mean()).item()
        assert one.ms > 0 and one.wait_ms >= one.exposed_dispatch_ms >= 0
        assert one.fused == (ranks == 1) and one.fusion == "layer" and one.schedule == "fusion=layer" and one.calls == 1
    assert len(logged) == 5 and all(len(values) == 3 + ranks for values in logged.values())
    assert abs(logged["uniep_rows_max_over_mean"][0] - found[0].rows_max_over_mean) < 1e-9
    for name, value, which in (
        ("uniep_backward_ms", found[1].ms, 0),
        ("uniep_forward_wait_ms", found[4].wait_ms, 2 + ranks),
    ):
        assert abs(logged[name][which] - sum(gathered(value)) / ranks) < 1e-9
    assert logged["uniep_forward_ms"][1 + rank] == found[2].ms
    assert all(math.isnan(values[1 + ranks]) for values in logged.values())
    if rank == 0:
        assert len(writer.entries) == 5 * (2 + ranks)
        assert writer.entries["uniep_forward_ms/layer 1"] == (logged["uniep_forward_ms"][0], 7)
        assert writer.entries["uniep_backward_ms/mtp 1"] == (logged["uniep_backward_ms"][-1], 7)


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


def check_new_parameters_stay_shared(rank, ranks):
    """Where all of a module's parameters become other ones: load_state_dict(assign=True), and to() with a flag."""
    expected = run_layer(moe_layer(True))
    layer = moe_layer(True)
    names = [name for name, _ in layer.named_parameters()]
    values = {name: value.clone() for name, value in layer.state_dict().items() if value is not None}
    for parameter in layer.parameters():
        parameter.data.zero_()
    layer.load_state_dict(values, assign=True, strict=False)
    assert [name for name, _ in layer.named_parameters()] == names
    assert_same(run_layer(layer), expected)
    layer.zero_grad()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        layer._apply(torch.clone)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert [name for name, _ in layer.named_parameters()] == names
    assert_same(run_layer(layer), expected)
    assert layer.experts.local_experts[0].linear_fc2.weight.uniep_layer == "layer 1"


def check_what_is_replaced_is_refused(rank, ranks):
    """As adapters and quantizers do; UniEP would run what was there before."""

    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

    class Adapter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    def wrap(layer):
        expert = layer.experts.local_experts[-1]
        expert.linear_fc1 = Wrapped(expert.linear_fc1)

    def wrap_and_move(layer):
        wrap(layer)
        layer.to("cpu")

    def convert(layer):
        linear = layer.experts.local_experts[-1].linear_fc2
        linear.__class__ = type("Quantized", (type(linear),), {})

    def replace(layer):
        linear = layer.experts.local_experts[-1].linear_fc2
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())

    def share(layer):
        layer.experts = moe_layer(True).experts

    def wrap_all(layer):
        layer.experts = Adapter(layer.experts)

    def convert_all(layer):
        layer.experts.__class__ = type("Quantized", (type(layer.experts),), {})

    for change, name, kind in (
        (wrap, "linear_fc1", "Wrapped"),
        (wrap_and_move, "linear_fc1", "Wrapped"),
        (convert, "linear_fc2", "Quantized"),
        (replace, "weight", "Parameter"),
        (share, "the whole module", "SequentialMLP"),
        (wrap_all, "the whole module", "Adapter"),
        (convert_all, "the whole module", "Quantized"),
    ):
        layer = moe_layer(True)
        change(layer)
        text = f"experts: {name} is not what it was when the layer was built, but another {kind}"
        expect_error(ValueError, text, lambda layer=layer: run_layer(layer))


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
    few = torch.randn(rank * 5, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)).bfloat16().requires_grad_()
    probs = torch.rand(len(few), EXPERTS)  # a router of Megatron's takes no rank without tokens
    y = layer.backend(few, probs, probs >= probs.topk(TOPK)[0][:, -1:])
    y.float().sum().backward()
    assert y.shape == few.shape == few.grad.shape
    inner.config = config()
    inner.config.moe_paged_stash = True
    expect_error(ValueError, "moe_paged_stash: True; UniEP's layer needs False", lambda: BackendLayer(inner))


def check_enable_needs_a_moe_layer(rank, ranks):
    expect_error(ValueError, "without a MoELayer", lambda: uniep.megatron.enable(get_gpt_layer_local_spec()))


def check_a_block_of_dense_layers_stays_as_it_is(rank, ranks):
    """A pipeline stage whose moe_layer_freq has none; its other stages have."""
    layers = [get_gpt_layer_local_spec() for _ in range(2)]
    mlps = [one.submodules.mlp for one in layers]
    for block in (types.SimpleNamespace(layer_specs=layers), types.SimpleNamespace(layer_specs=[])):
        assert uniep.megatron.enable(block) is block
    assert all(one.submodules.mlp is mlp for one, mlp in zip(layers, mlps, strict=True))


def check_options_are_checked_at_once(rank, ranks):
    """Before there is a layer."""
    given = (
        ({"save": "nope"}, "save: 'nope'; legal are keep, redispatch, rows, recompute"),
        (
            {"schedule": "fusoin=layer"},
            "schedule: schedule field 'fusoin' is unknown; the nearest legal field is fusion",
        ),
        ({"schedule": ("auto", "tile.m=63")}, "schedule: tile.m=63: legal are 64, 128 or 256"),
        ({"schedule": 5}, "schedule: 5; legal is a text, or two"),
        ({"reserve_sms": "many"}, "reserve_sms: 'many'; legal are"),
        ({"verify": "x"}, "verify: 'x'; must be a number of steps, or 0"),
        ({"tune_until": -1}, "tune_until: -1; must be a number of steps, or 0"),
        ({"verify": 5, "save": "nope"}, "save: 'nope'"),
    )
    for options, text in given:
        expect_error(ValueError, text, lambda options=options: uniep.megatron.patch(**options))
        expect_error(ValueError, text, lambda options=options: uniep.megatron.enable(spec(False), **options))
    assert rerun.watcher is None and trials.active is None
    assert not isinstance(moe_layer(False), uniep.megatron.UniEPMoELayer)
    try:  # what the machine and the shape decide is the layer's to refuse
        uniep.megatron.patch(schedule="comm.reserve_sms=100,tile.stages=8")
    finally:
        uniep.megatron.unpatch()


def check_enable_looks_into_stacks(rank, ranks):
    """Of hybrid models, and of multi-token prediction."""
    for name in ("moe_layer", "mtp_model_layer"):
        inner = ModuleSpec(module=None, submodules=types.SimpleNamespace(**{name: spec(False)}))
        uniep.megatron.enable(types.SimpleNamespace(layer_specs=[inner]))
        layer = getattr(inner.submodules, name).submodules.mlp(config(), layer_number=1)
        assert type(layer) is uniep.megatron.UniEPMoELayer


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
            name_layer(module.w2_0, kind)
            uniep.record_stats()
            generator = torch.Generator().manual_seed(9 + rank)
            x = torch.randn(40, HIDDEN, generator=generator).bfloat16().requires_grad_()
            probs = torch.rand(40, EXPERTS, generator=generator)
            y = module(x, probs, probs >= probs.topk(TOPK).values[:, -1:])
            y.backward(torch.ones_like(y))
            assert [one.layer for one in uniep.stats()] == [kind] * 2
            uniep.record_stats(False)
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
