"""What test_parallel.py starts: data parallelism around expert-parallel layers, beside one process."""

import os
import pathlib
import shutil
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint_files
import torch.distributed.checkpoint.state_dict as state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import DTensor, Shard

import uniep
import uniep.parallel
from distributed_checks import alone, run_checks, same_bits, value_error
from layers import relative_error

DDP = torch.nn.parallel.DistributedDataParallel
OPTIONS = [{}, {"main_grad": "param"}, {"main_grad": "pair"}]
OPTIONS += [{"grad_dtype": torch.float32}] if hasattr(torch.Tensor, "grad_dtype") else []


class Model(torch.nn.Module):
    def __init__(self, group, dtype=torch.bfloat16, **options):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (torch.nn.Linear(64, 64, dtype=dtype) for _ in range(2))
        pair = torch.zeros(8 // group.size, 64, 64), torch.zeros(8 // group.size, 64, 32)
        if options.get("main_grad") == "pair":
            options = options | {"main_grad": pair}
        self.moe = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group, **options)
        if options.get("main_grad") == "param":
            self.moe.experts.gate_up_proj.main_grad, self.moe.experts.down_proj.main_grad = pair
        self.sums = pair if "main_grad" in options else None

    def forward(self, x):
        return self.b(self.moe(self.a(x)))

    def expert_gradients(self):
        return self.sums or [one.grad for one in self.moe.experts.parameters()]


def groups(size):
    """This rank's group of so many ranks, and the process group of its replicas."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    key = f"{size} of {ranks}"
    if key not in groups.made:
        shares = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
        replicas = [dist.new_group(list(range(first, ranks, size))) for first in range(size)]
        groups.made[key] = uniep.Group(shares[rank // size], device="cpu", workers=1), replicas[rank % size]
    return groups.made[key]


groups.made = {}


def sizes(ranks):
    return [size for size in (1, 2, 4) if size <= ranks]


def wrapped(model):
    DDP._set_params_and_buffers_to_ignore_for_model(model, list(uniep.expert_parameters(model)))
    return DDP(model)


def backward(model, step=0, dtype=torch.bfloat16, part=None):
    """Of the mean of the whole batch, or of this rank's part."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
    model(x if part is None else x.chunk(part[1])[part[0]]).float().square().mean().backward()


def gathered(tensor, group=None):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def assert_equal_on(group, tensors):
    for tensor in tensors:
        assert all(same_bits(one, tensor) for one in gathered(tensor.detach(), group))


def check_gradients_are_those_of_one_process(rank, ranks):
    for size in sizes(ranks):
        group, replicas = groups(size)
        for options in OPTIONS:
            model, whole = Model(group, **options), Model(alone(), **options)
            assert set(uniep.expert_parameters(model)) == {"moe.experts.gate_up_proj", "moe.experts.down_proj"}
            backward(wrapped(model), part=(rank, ranks))
            uniep.average_expert_gradients(model, replicas)
            backward(whole)
            uniep.average_expert_gradients(whole, "self")
            for own, expected in zip(model.expert_gradients(), whole.expert_gradients(), strict=True):
                expected = expected.chunk(size)[group.rank].double()
                assert relative_error(own, expected) < 0.02, (size, options)
            assert_equal_on(replicas, model.expert_gradients())
            for name in ("a.weight", "b.bias", "moe.router.weight"):
                own, expected = (one.get_parameter(name).grad for one in (model, whole))
                assert relative_error(own, expected.double()) < 0.02, name


def check_steps_keep_replicas_equal_and_clip_alike(rank, ranks):
    for size in sizes(ranks):
        group, replicas = groups(size)
        for options in OPTIONS:
            model, whole = Model(group, **options), Model(alone(), **options)
            parallel, experts = wrapped(model), list(model.moe.experts.parameters())
            rest = [one for one in model.parameters() if all(one is not other for other in experts)]
            backward(whole)
            expected = uniep.clip_grad_norm(whole, 1e-3)
            for step in range(3):
                backward(parallel, step, part=(rank, ranks))
                uniep.average_expert_gradients(model, replicas)
                norm = uniep.clip_grad_norm(model, 1e-3)
                assert norm > 1e-2, "nothing was clipped"
                assert_equal_on(None, [norm])
                if step == 0:
                    assert abs(norm / expected - 1) < 0.01
                    assert abs(uniep.clip_grad_norm(model, 1.0) / 1e-3 - 1) < 0.01
                with torch.no_grad():
                    for parameter, gradient in zip(experts, model.expert_gradients(), strict=True):
                        parameter -= gradient.to(parameter.dtype) * 10
                        gradient.zero_()
                        parameter.grad = None
                torch.optim.SGD(rest, lr=10.0).step()
                for parameter in rest:
                    parameter.grad = None
            assert_equal_on(replicas, experts)
            assert_equal_on(None, rest)


def check_clipping_over_pipeline_stages(rank, ranks):
    """Neighbours share a stage's experts; the factor is that of all stages, with the same bits on all ranks."""
    for size in sizes(ranks):
        group, pipeline = groups(size)
        for options in OPTIONS:
            model = Model(group, **options)
            backward(model, step=rank // size)
            own = uniep.clip_grad_norm(model, 1e9)  # which clips nothing
            every = torch.stack(gathered(own, pipeline)).double()
            assert len(every) == ranks // size and len(every.unique()) == len(every)
            norm = uniep.clip_grad_norm(model, 1e-3, pipeline)
            assert_equal_on(None, [norm])
            assert abs(norm / every.square().sum().sqrt() - 1) < 1e-6
            clipped = uniep.clip_grad_norm(model, 1.0)
            assert abs(clipped / own / (1e-3 / norm) - 1) < 0.01


def check_a_pipeline_has_the_gradients_of_one_process(rank, ranks):
    """1F1B as docs/pytorch_parallel.md has it, on memory that holds NaN where nobody has written."""
    parts = 4

    def loss(y, target):
        return (y.float() - target).square().mean() / parts

    x, target = torch.randn(2, 8 * parts, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    for options in ({}, {"main_grad": "param"}):
        model, whole = Model(alone(), **options), [Model(alone(), **options) for _ in range(ranks)]
        torch.use_deterministic_algorithms(True)
        try:
            like = torch.empty(8, 64, dtype=torch.bfloat16)
            given = {"input_args": like.clone().requires_grad_(rank > 0), "output_args": like.clone().requires_grad_()}
            stage = PipelineStage(model, rank, ranks, torch.device("cpu"), group=dist.group.WORLD, **given)
            schedule = Schedule1F1B(stage, parts, loss_fn=loss, scale_grads=False)
            schedule.step(*[x] * (rank == 0), **({"target": target} if rank == ranks - 1 else {}))
        finally:
            torch.use_deterministic_algorithms(False)
        for one, wanted in zip(x.chunk(parts), target.chunk(parts), strict=True):
            y = one
            for each in whole:
                y = each(y)
            loss(y, wanted).backward()
        pairs = [(model.a.weight.grad, whole[rank].a.weight.grad)]
        pairs += zip(model.expert_gradients(), whole[rank].expert_gradients(), strict=True)
        assert all(same_bits(own, expected) and own.any() for own, expected in pairs), options


def check_dense_parameters_of_fsdp2(rank, ranks):
    group, _ = groups(ranks)
    model, whole = (Model(one, torch.float32) for one in (group, alone()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ignored = set(uniep.expert_parameters(model).values())
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), mp_policy=policy, ignored_params=ignored)
    backward(model, dtype=torch.float32, part=(rank, ranks))
    uniep.average_expert_gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        backward(whole)
    expected = uniep.clip_grad_norm(whole, 1e-3)
    norm = uniep.clip_grad_norm(model, 1e-3)
    assert_equal_on(None, [norm])
    assert abs(norm / expected - 1) < 0.01
    for own, other in ((model.a, whole.a), (model.moe.router, whole.moe.router)):
        assert relative_error(own.weight.grad.full_tensor(), other.weight.grad.double()) < 0.02


def check_a_router_that_fsdp2_leaves_in_fp32(rank, ranks):
    """docs/pytorch_parallel.md: the layer is a unit of its own, whose policy has no param_dtype."""
    group, _ = groups(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    of_dense = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for of_layer, is_exact in ((MixedPrecisionPolicy(reduce_dtype=torch.float32), True), (of_dense, False)):
        model, seen = Model(group, torch.float32), []
        weight = model.moe.router.weight.detach().clone()
        model.moe.experts.register_forward_pre_hook(lambda _, given, seen=seen: seen.extend(given))
        ignored = set(uniep.expert_parameters(model).values())
        fully_shard(model.moe, mesh=mesh, mp_policy=of_layer, ignored_params=ignored)
        fully_shard(model, mesh=mesh, mp_policy=of_dense, ignored_params=ignored)
        backward(model, dtype=torch.float32, part=(rank, ranks))
        x, _, probs = seen
        expected = torch.softmax(x.float() @ weight.T, -1).topk(2).values
        assert same_bits(probs, expected / expected.sum(-1, keepdim=True)) == is_exact
        assert model.moe.router.weight.grad.dtype == torch.float32


def check_checkpoints_of_experts_that_fsdp2_shards_over_replicas(rank, ranks):
    """Each rank has a part of its experts, not all as many; and what is saved is loaded into another sharding."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"uniep_sharded_{os.getppid()}"

    def made(size, experts):
        group, replicas = groups(size)
        torch.manual_seed(0)
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=experts, topk=2, group=group, bias=True)
        whole = {name: one.detach().clone() for name, one in layer.named_parameters()}
        fully_shard(layer.experts, mesh=DeviceMesh.from_group(replicas, "cpu"))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        layer(torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        optimizer.step()
        kept = state_dict.get_optimizer_state_dict(layer, optimizer)
        state = {"model": uniep.checkpoint_state(layer), "optimizer": uniep.checkpoint_state(layer, kept)}
        return layer, whole, optimizer, state

    def local(one):
        return one.to_local() if isinstance(one, DTensor) else one

    def tensors(layer, optimizer):
        parameters = [local(one.detach()) for one in layer.parameters()]
        return parameters + [local(optimizer.state[one]["exp_avg"]) for one in layer.parameters()]

    several = [size for size in sizes(ranks) if size > 1]
    for size, experts in [(one, count * one) for one in several for count in (4, 5)]:
        layer, whole, optimizer, state = made(size, experts)
        weight = state["model"]["experts.gate_up_proj"]
        assert tuple(weight.shape) == (experts, 64, 64)
        assert weight.to_local().data_ptr() == local(layer.experts.gate_up_proj).data_ptr()
        before = [one.clone() for one in tensors(layer, optimizer)]
        every = layer.experts.gate_up_proj.full_tensor()  # of this rank's group's part
        assert not same_bits(every, whole["experts.gate_up_proj"])
        assert same_bits(weight.full_tensor().chunk(size)[groups(size)[0].rank], every)
        checkpoint_files.save(state, checkpoint_id=folder)
        with torch.no_grad():
            for one in tensors(layer, optimizer):
                one.zero_()
        checkpoint_files.load(state, checkpoint_id=folder)
        assert all(same_bits(one, other) for one, other in zip(tensors(layer, optimizer), before, strict=True))
        other = uniep.MoELayer(hidden=64, intermediate=32, num_experts=experts, topk=2, group=groups(1)[0], bias=True)
        found = uniep.checkpoint_state(other)
        checkpoint_files.load({"model": found}, checkpoint_id=folder)
        assert same_bits(found["experts.gate_up_proj"], weight.full_tensor())
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()


def check_experts_that_fsdp2_has_sharded_are_drawn_as_others(rank, ranks):
    """On meta, sharded over the replicas, given memory and drawn: the values of a layer that is not sharded."""
    placements = [None, lambda one: Shard(1)]
    for size, experts, place in [
        (one, one * count, place) for one in sizes(ranks) for count in (3, 4) for place in placements
    ]:
        group, replicas = groups(size)

        def made(group=group, experts=experts):
            torch.manual_seed(3)
            return uniep.MoELayer(hidden=64, intermediate=32, num_experts=experts, topk=2, group=group, bias=True)

        plain = made()
        with torch.device("meta"):
            layer = made()
        fully_shard(layer.experts, mesh=DeviceMesh.from_group(replicas, "cpu"), shard_placement_fn=place)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            for one in layer.experts.parameters():
                one.to_local().fill_(7)
        torch.manual_seed(3)
        layer.router.reset_parameters()
        layer.experts.reset_parameters()
        for (name, own), other in zip(layer.experts.named_parameters(), plain.experts.parameters(), strict=True):
            assert isinstance(own, DTensor) and same_bits(own.full_tensor(), other), (size, experts, name)


def check_gradients_travel_in_buckets(rank, ranks):
    """A collective for each 64 MiB and dtype, whose sums are those of the tensors alone."""
    group, replicas = groups(1)
    layers = [
        uniep.Experts(num_experts=2, hidden=64, intermediate=8, group=group, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    ]
    module = torch.nn.ModuleList(layers)

    def averaged(most_bytes):
        counted, reduce = [], dist.all_reduce
        torch.manual_seed(rank)
        for one in module.parameters():
            one.grad = torch.randn(one.shape).to(one.dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uniep.parallel, "_BUCKET_BYTES", most_bytes)
            patch.setattr(dist, "all_reduce", lambda tensor, **given: counted.append(tensor) or reduce(tensor, **given))
            uniep.average_expert_gradients(module, replicas)
        known, *sums = counted
        assert known.dtype == torch.int32 and known.numel() == 6
        return sums, [one.grad for one in module.parameters()]

    assert uniep.parallel._BUCKET_BYTES == 64 << 20
    alone_each, expected = averaged(0)
    assert len(alone_each) == 6 and all(one is sums for one, sums in zip(alone_each[:2], expected[:2], strict=True))
    buckets, found = averaged(64 << 20)
    assert [one.dtype for one in buckets] == [torch.bfloat16, torch.float32]
    assert [one.numel() for one in buckets] == [2 * sum(one.numel() for one in layers[0].parameters()), 2 * 64 * 24]
    for one, other in zip(found, expected, strict=True):
        if ranks == 2:  # of more ranks gloo adds a part of a tensor in an order of its place
            assert same_bits(one, other)
        assert relative_error(one, other.double()) < 0.01
    # Both layers in bf16 fill one each; of fp32 the larger tensor is more than one, and goes alone.
    assert len(averaged(sum(one.nbytes for one in layers[0].parameters()))[0]) == 4


def check_a_layer_that_only_some_replicas_ran(rank, ranks):
    """As of a tower without inputs: zeros there, a mean over all replicas, and nothing where no replica has any."""
    group, replicas = groups(1)
    fp32 = {"grad_dtype": torch.float32} if hasattr(torch.Tensor, "grad_dtype") else {}
    layers = [uniep.Experts(num_experts=2, hidden=64, intermediate=8, group=group, **one) for one in ({}, fp32, {}, {})]
    if fp32 and rank == 0:
        for one in layers[1].parameters():  # as shard_experts() leaves it where a layer has not run
            one.grad_dtype = one.dtype
    module = torch.nn.ModuleList(layers)
    expected = []
    for number, layer in enumerate(layers):
        ran = (rank > 0, rank > 0, True, False)[number]
        for one in layer.parameters():
            dtype = torch.float32 if number == 1 and fp32 else one.dtype
            own = torch.full(one.shape, float(rank + number), dtype=dtype)
            if ran:
                one.grad = own
            total = sum(other + number for other in range(number < 2, ranks)) / ranks
            expected.append(None if number == 3 else torch.full_like(own, total))
    uniep.average_expert_gradients(module, replicas)
    for one, wanted in zip(module.parameters(), expected, strict=True):
        assert (one.grad is None) == (wanted is None)
        assert wanted is None or same_bits(one.grad, wanted), (one.grad.flatten()[0], wanted.flatten()[0])


def check_tied_parameters_count_once(rank, ranks):
    """In .grad and in main_grad: averaged, counted and scaled as often as those of one layer."""
    group, replicas = groups(1)
    for options in ({}, {"main_grad": "param"}, {"main_grad": "pair"}):
        model = Model(group, **options)
        once = torch.nn.ModuleList([model, Model(group)])
        tied = once[1].moe.experts
        tied.gate_up_proj, tied.down_proj = model.moe.experts.parameters()
        tied.options |= {"main_grad": model.sums} if options else {}
        backward(model)
        before = [one.clone() for one in model.expert_gradients()]
        uniep.average_expert_gradients(once, replicas)
        for one, other in zip(model.expert_gradients(), before, strict=True):
            assert relative_error(one, other.double()) < 0.01, options  # replicas of one batch: their mean
        norm = uniep.clip_grad_norm(model, 1e9)  # which clips nothing
        assert same_bits(uniep.clip_grad_norm(once, 1e9), norm), options
        uniep.clip_grad_norm(once, float(norm) / 4)
        assert abs(uniep.clip_grad_norm(model, 1e9) / norm - 0.25) < 0.01, options


def check_refusals(rank, ranks):
    model = Model(groups(1)[0])
    backward(model)
    with value_error(f"replicas: None, where the job has {ranks} ranks and the experts' group 1; must be the process"):
        uniep.average_expert_gradients(model)
    with value_error("replicas: 'all'; legal are a process group, 'self' and None"):
        uniep.average_expert_gradients(model, "all")
    group = groups(ranks)[0]
    with value_error(f"replicas: ranks {list(range(ranks))} are in one group of experts with this rank"):
        uniep.average_expert_gradients(Model(group), group.process_group)
    with value_error("max_norm: 0; must be above 0"):
        uniep.clip_grad_norm(model, 0)
    uniep.average_expert_gradients(torch.nn.Linear(2, 2))
    if ranks == 1:
        return
    sharded = uniep.MoELayer(hidden=64, intermediate=32, num_experts=2 * ranks, topk=2, group=group)
    fully_shard(sharded.experts, mesh=init_device_mesh("cpu", (ranks,)))
    for work in (uniep.average_expert_gradients, lambda module: uniep.clip_grad_norm(module, 1.0)):
        with value_error("module: experts are sharded by FSDP2 over ranks of their own group"):
            work(sharded)


def check_replicas_that_the_group_knows(rank, ranks):
    group, replicas = groups(1)
    model = Model(group)
    backward(model, step=rank)
    group.replicas = replicas
    try:
        uniep.average_expert_gradients(model)
    finally:
        group.replicas = None
    assert_equal_on(None, model.expert_gradients())


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
