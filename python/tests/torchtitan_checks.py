"""What test_torchtitan.py starts: UniEP's routed experts beside torchtitan's."""

import titan_cpu  # isort: skip  (torchtitan looks for its device when it is imported)

import dataclasses
import logging
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.gpt_oss import model_registry as gpt_oss_registry
from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT
from torchtitan.protocols.module import Module

import uniep
import uniep.torchtitan
from distributed_checks import disabled, expect_error, run_checks
from layers import relative_error, same_bits

EXPERTS, TOPK, DIM = 16, 8, 256
OVERRIDE = "uniep.torchtitan.routed_experts"


def set_up() -> None:
    titan_utils.set_spmd_backend("partial_dtensor")


def moe_config(options: dict | None, ranks: int, seed: int = 0) -> MoE.Config:
    """The MoE layer of Qwen3's debug model; with options, UniEP's."""
    spec = titan_cpu.qwen3_moe().model_spec
    spec.model.layers = spec.model.layers[:1]
    if options is not None:
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, options)]), spec.model)
    config = spec.model.layers[0].moe
    enable_ep = ranks > 1
    set_moe_sharding_config(
        config, enable_ep=enable_ep, enable_sp=False, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT
    )
    return config


def dims(ranks: int, ep: int, tp: int = 1, cp: int = 1, backend: str = "partial_dtensor") -> ParallelDims:
    found = ParallelDims(
        dp_replicate=1,
        dp_shard=ranks // (tp * cp),
        cp=cp,
        tp=tp,
        pp=1,
        ep=ep,
        world_size=ranks,
        spmd_backend=backend,
    )
    found.build_mesh()
    return found


def make_moe(options: dict | None, ranks: int, parallel: bool = True) -> MoE:
    """The layer on all ranks, with weights that depend on nothing; expert-parallel over them."""
    torch.manual_seed(3)
    layer = moe_config(options, ranks).build()
    layer.init_states()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2.0)
    layer = layer.bfloat16()
    if parallel and ranks > 1:
        layer.parallelize(dims(ranks, ep=ranks))
    return layer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run(layer: torch.nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Output and gradients of one step."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(2, 24 + 8 * rank, DIM, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(x.shape, generator=generator).bfloat16()
    y = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    found |= {
        name.replace("_checkpoint_wrapped_module.", ""): local(one.grad) for name, one in layer.named_parameters()
    }
    return found


def in_float64(layer: MoE, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What run() gives in float64, for the routing that the layer's router chooses; by plain loops."""
    layer = make_moe(None, 1)
    weights = {name: one.detach().double().requires_grad_() for name, one in layer.named_parameters()}
    w1, w2, w3 = (weights[f"routed_experts.inner_experts.{name}"] for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    found: dict[str, torch.Tensor] = {}
    for source in range(ranks):
        generator = torch.Generator().manual_seed(10 + source)
        data = torch.randn(2, 24 + 8 * source, DIM, generator=generator).bfloat16()
        dy = torch.randn(data.shape, generator=generator).bfloat16().double().reshape(-1, DIM)
        with torch.no_grad():
            ids = layer.router(data, layer.expert_bias_E)[1].reshape(-1, TOPK)
        x = data.double().reshape(-1, DIM).requires_grad_()
        scores = torch.softmax(x @ weights["router.gate.weight"].T, -1).gather(1, ids)
        scores = scores / scores.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            rows = torch.nn.functional.silu(x[token] @ w1[expert].T) * (x[token] @ w3[expert].T)
            y = y.index_add(0, token, rows @ w2[expert].T * scores[token, slot, None])
        y.backward(dy)
        if source == rank:
            found = {"y": y.detach().view(data.shape), "x": x.grad.view(data.shape)}
    part = slice(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        name = f"routed_experts.inner_experts.{name}"
        found[name] = weights[name].grad[part]
    return found


def check_layer_beside_torchtitans(rank: int, ranks: int) -> None:
    stock, ours = make_moe(None, ranks), make_moe({}, ranks)
    assert type(ours.routed_experts).__name__ == "UniEPRoutedExperts"
    assert ours.routed_experts.group.size == ranks
    expected = in_float64(ours, rank, ranks)
    found = {"torchtitan": run(stock, rank), "UniEP": run(ours, rank)}
    for name, want in expected.items():
        theirs, own = (relative_error(result[name], want) for result in found.values())
        if rank == 0:
            print(f"{name}: torchtitan {theirs:.5f}, UniEP {own:.5f}", flush=True)
        assert own <= 1.05 * theirs, (name, own, theirs)
        assert own < 0.02, (name, own)


def check_every_spmd_backend(rank: int, ranks: int) -> None:
    """The group of the expert-parallel ranks, and collectives of FSDP that it leaves SMs to."""
    if ranks == 1:
        return
    expected = run(make_moe({}, ranks), rank)
    for backend, cp in (("spmd_types", 1), ("full_dtensor", 1), ("spmd_types", ranks), ("partial_dtensor", 1)):
        titan_utils.set_spmd_backend(backend)
        found = dims(ranks, ep=ranks, cp=cp, backend=backend)
        layer = make_moe({}, ranks, parallel=False)
        layer.parallelize(found)
        group = layer.routed_experts.group
        assert group.size == ranks, backend
        if backend == "partial_dtensor":
            fsdp = found.get_mesh("fsdp").get_group()
        else:
            fsdp = _get_mesh_info(*resolve_fsdp_mesh(found)).shard_process_group
        assert fsdp.size() == ranks and fsdp.group_name in group._beside, (backend, cp, group._beside)
        if backend == "spmd_types" and cp == 1:
            given = run(layer, rank)
            assert all(same_bits(given[name], expected[name]) for name in expected)
    set_up()


def check_scores_behind_w2(rank: int, ranks: int) -> None:
    """As torchtitan multiplies them: the output differs, gradients of the experts do not."""
    before, behind = (run(make_moe(options, ranks), rank) for options in ({}, {"router_weight": "output"}))
    assert not same_bits(before["y"], behind["y"])
    assert relative_error(behind["y"], before["y"].double()) < 0.01
    assert all(same_bits(behind[name], before[name]) for name in before if "inner_experts" in name)
    expected = in_float64(make_moe({}, ranks), rank, ranks)
    theirs, own = (relative_error(found["y"], expected["y"]) for found in (run(make_moe(None, ranks), rank), behind))
    assert own <= 1.05 * theirs, (own, theirs)


def check_bits_do_not_depend_on_options(rank: int, ranks: int) -> None:
    expected = run(make_moe({}, ranks), rank)
    for options in ({"save": "redispatch"}, {"save": "recompute"}, {"schedule": "fusion=none"}):
        found = run(make_moe(options, ranks), rank)
        assert all(same_bits(found[name], expected[name]) for name in expected), options


def check_activation_checkpointing(rank: int, ranks: int) -> None:
    expected = run(make_moe({}, ranks), rank)
    for policy in (SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["router.gate"]), FullAC.Config()):
        wrapped = policy.build()._wrap_block(make_moe({}, ranks))
        found = run(wrapped, rank)
        assert all(same_bits(found[name], expected[name]) for name in expected), policy


def check_state_dicts_are_torchtitans(rank: int, ranks: int) -> None:
    stock, ours = make_moe(None, ranks), make_moe({}, ranks)
    theirs, own = stock.state_dict(), ours.state_dict()
    assert list(theirs) == list(own)
    assert all(same_bits(local(theirs[name]), local(own[name])) for name in own)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1.0)
    ours.load_state_dict(stock.state_dict())
    pairs = zip(ours.parameters(), stock.parameters(), strict=True)
    assert all(same_bits(local(one), local(other)) for one, other in pairs)
    stock.load_state_dict(own)


def check_fsdp_of_the_experts(rank: int, ranks: int) -> None:
    """Sharded by themselves, the experts are gathered by the hooks of their own forward."""
    plain, sharded = make_moe({}, ranks, parallel=False), make_moe({}, ranks, parallel=False)
    fully_shard(sharded.routed_experts.inner_experts)
    titan_cpu.plain_sums(sharded)
    expected, found = run(plain, rank), run(sharded, rank)
    assert same_bits(found["y"], expected["y"]) and same_bits(found["x"], expected["x"])
    for name, gradient in expected.items():
        if "inner_experts" in name:
            dist.all_reduce(gradient)
            assert same_bits(found[name], gradient.chunk(ranks)[rank]), name


def check_uniep_disable_is_torchtitans_layer(rank: int, ranks: int) -> None:
    stock = make_moe(None, ranks)
    with disabled():
        layer = make_moe({}, ranks)
    assert type(layer.routed_experts) is type(stock.routed_experts)
    assert list(layer.state_dict()) == list(stock.state_dict())
    expected, found = run(stock, rank), run(layer, rank)
    assert all(same_bits(found[name], expected[name]) for name in expected)


def check_both_shapes(rank: int, ranks: int) -> None:
    """[B, L, ...] as torchtitan 0.3 has it, and [T, ...]."""
    experts = make_moe({}, ranks, parallel=False).routed_experts
    x = torch.randn(2, 8, DIM).bfloat16()
    scores, ids = torch.rand(2, 8, EXPERTS).topk(TOPK)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    flat = experts(x.flatten(0, 1), scores.flatten(0, 1), ids.flatten(0, 1), counts)
    assert same_bits(experts(x, scores, ids, counts), flat.view(x.shape))


def routed(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, scores, ids and dy of as many tokens as this rank has."""
    generator = torch.Generator().manual_seed(20 + rank)
    tokens = 24 + 8 * rank
    x, dy = (torch.randn(tokens, DIM, generator=generator).bfloat16() for _ in range(2))
    scores, ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK)
    return x.requires_grad_(), scores.requires_grad_(), ids, dy


def run_routed(layer: torch.nn.Module, rank: int, bad: dict[tuple[int, int], float]) -> dict[str, torch.Tensor]:
    """Output and gradients of routed experts, with some scores {(token, slot): value} that are no numbers."""
    x, scores, ids, dy = routed(rank)
    with torch.no_grad():
        for place, value in bad.items():
            scores[place] = value
    layer.zero_grad()
    y = layer(x[None], scores[None], ids[None], torch.bincount(ids.flatten(), minlength=EXPERTS))[0]
    y.backward(torch.where(y.isnan(), torch.nan, dy))  # as of a loss of y
    found = {"y": y.detach(), "x": x.grad, "scores": scores.grad}
    return found | {name: local(one.grad).clone() for name, one in layer.named_parameters()}


def check_finite_scores_give_the_bits_of_moe(rank: int, ranks: int) -> None:
    layer = make_moe({}, ranks).routed_experts
    x, scores, ids, dy = routed(rank)
    gate, down, up = (local(getattr(layer.inner_experts, name)).detach() for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    weights = [one.clone().requires_grad_() for one in (gate, down, up)]
    y = uniep.moe(x, ids, scores, (weights[0], weights[2]), weights[1], group=layer.group)
    y.backward(dy)
    expected = [y.detach(), x.grad, scores.grad, *(one.grad for one in weights)]
    found = run_routed(layer, rank, {})
    for name, want in zip(found, expected, strict=True):
        assert same_bits(found[name], want), name


def check_scores_that_are_no_numbers(rank: int, ranks: int) -> None:
    """NaN where torchtitan's layer has it, the bits of all else, and no error that one rank of a job would raise."""
    bad = {(3, 1): torch.nan, (5, 0): torch.nan}
    stock, ours = make_moe(None, ranks).routed_experts, make_moe({}, ranks).routed_experts
    found, expected = run_routed(ours, rank, bad), run_routed(ours, rank, {})
    theirs = run_routed(stock, rank, bad)
    fine = torch.ones(len(found["y"]), dtype=torch.bool)
    fine[[3, 5]] = False
    for name in ("y", "x", "scores"):
        assert same_bits(found[name][fine], expected[name][fine]), name
    for name, own in found.items():
        assert own.isnan().any() and torch.equal(own.isnan(), theirs[name].isnan()), name
    with_inf = run_routed(ours, rank, bad | {(7, 0): torch.inf})
    assert with_inf["y"][[3, 5, 7]].isnan().all() and with_inf["y"].isnan().sum() == 3 * DIM
    checkpointed = FullAC.Config().build()._wrap_block(make_moe({}, ranks).routed_experts)
    compiled = torch.compile(make_moe({}, ranks).routed_experts, backend="aot_eager", fullgraph=True)
    for other in (checkpointed, compiled):
        for given, want in ((bad, found), ({}, expected)):
            for one, own in zip(run_routed(other, rank, given).values(), want.values(), strict=True):
                assert same_bits(one, own)
    torch._dynamo.reset()


def check_a_pipeline_that_runs_on_memory_of_any_content(rank: int, ranks: int) -> None:
    """PipelineStage runs later stages once on memory that nobody has written, to learn shapes; here it holds NaN."""
    if ranks == 1:
        return
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        layer = make_moe({}, ranks, parallel=False)
        stage = PipelineStage(layer, rank, ranks, torch.device("cpu"), group=dist.group.WORLD)
        schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, target: (y.float() - target).square().mean())
        batch = torch.randn(4, 16, DIM, generator=torch.Generator().manual_seed(4)).bfloat16()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=torch.zeros(batch.shape), losses=losses)
        assert len(losses) == 2 * (rank == ranks - 1) and all(one.isfinite() for one in losses), losses
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(one.grad.isfinite().all() for one in layer.parameters())


def check_a_whole_model_is_one_line(rank: int, ranks: int) -> None:
    config = titan_cpu.qwen3_moe()
    told = apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    assert len(told) == titan_cpu.LAYERS and all("UniEPRoutedExperts" in line for line in told)
    model = config.model_spec.model.build()
    model.verify_module_protocol()
    stock = titan_cpu.qwen3_moe().model_spec.model.build()
    assert list(model.state_dict()) == list(stock.state_dict())


def check_refusals(rank: int, ranks: int) -> None:
    text = "inner_experts: GptOssGroupedExperts; UniEP serves GroupedExperts"
    spec = gpt_oss_registry("debugmodel")
    expect_error(ValueError, text, lambda: apply_overrides(OverrideConfig(imports=[OVERRIDE]), spec.model))

    config = moe_config(None, 1).routed_experts

    class Other(Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(type(config)):
            pass

    other = Other.Config(inner_experts=config.inner_experts, token_dispatcher=config.token_dispatcher)
    expect_error(ValueError, "Other; UniEP replaces torchtitan's own", lambda: uniep.torchtitan.refuse(other))
    for options, text in (
        ({"save": "nope"}, "save: 'nope'; legal are keep"),
        ({"schedule": "fusion=laier"}, "schedule: fusion=laier: legal are none, pairs or layer"),
        ({"router_weight": "outputs"}, "router_weight: 'outputs'; legal are activation"),
        ({"capacity": (0, 8)}, "capacity: (0, 8); must be (rows or a factor, tokens)"),
    ):
        expect_error(ValueError, text, lambda options=options: uniep.torchtitan.routed_experts(config, **options))
    config.inner_experts.hidden_dim = 36
    expect_error(ValueError, "inner_experts.hidden_dim: 36; must be a", lambda: uniep.torchtitan.routed_experts(config))
    if ranks > 1:
        layer = moe_config({}, 1).build()
        text = f"parallelism.tensor_parallel_degree: {ranks} without expert parallelism"
        expect_error(ValueError, text, lambda: layer.parallelize(dims(ranks, ep=1, tp=ranks)))


def check_what_the_log_says(rank: int, ranks: int) -> None:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    uniep.torchtitan._told.clear()
    handler = Handler()
    logging.getLogger("uniep").addHandler(handler)
    for _ in range(2):
        moe_config({}, 1)
    logging.getLogger("uniep").removeHandler(handler)
    assert [line for line in lines if "router scores behind w2" in line] == lines and len(lines) == 1, lines


if __name__ == "__main__":
    sys.exit(run_checks(globals(), set_up))
