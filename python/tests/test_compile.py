"""torch.compile with the layer inside of the graph: one graph, the bits of eager, and torch's own checks of each op."""

import functools

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import uniep
import uniep.call
import uniep.exchange_ops
import uniep.ops
import uniep.tuning
from layers import Layer, Result, assert_same, dense_gradient, make_dense, make_layer, run_moe, same_bits


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run_compiled(layer: Layer, block, backend: str = "aot_eager", **compile_options) -> Result:
    """Forward and backward of block(x, ids, probs, w1, w2) as one graph."""
    x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    compiled = torch.compile(block, backend=backend, fullgraph=True, **compile_options)
    y = compiled(x, layer.ids[0], probs, w1, w2)
    y.backward(layer.dy[0].view(y.shape))
    return Result(y.detach(), x.grad, probs.grad, w1.grad, w2.grad)


OPTIONS = [
    {},
    {"save": "redispatch"},
    {"save": "recompute"},
    {"save": "rows"},
    {"capacity": (4096, 64)},
    {"capacity": (4096, 64), "save": "redispatch"},
    {"schedule": ("fusion=none", "fusion=pairs")},
]


@pytest.mark.parametrize(
    ("options", "backend"),
    [*((options, "aot_eager") for options in OPTIONS), (OPTIONS[0], "eager"), *((o, "inductor") for o in OPTIONS[:3])],
    ids=str,
)
def test_one_graph_with_the_bits_of_eager(options, backend, recwarn):
    layer = make_layer([40], unused=0.1)

    def block(x, ids, probs, w1, w2):
        return uniep.moe(x * 1, ids, probs, w1, w2, **options) * 1

    assert_same(run_compiled(layer, block, backend), run_moe(layer, 0, layer.local(0, 1)))
    assert not [warning for warning in recwarn if "Dynamo" in str(warning.message)]


@pytest.mark.parametrize(
    ("save", "capacity", "backend"),
    [
        ("keep", None, "aot_eager"),
        ("redispatch", None, "aot_eager"),
        ("recompute", None, "aot_eager"),
        ("keep", (4096, 64), "aot_eager"),
        ("keep", None, "inductor"),
    ],
)
def test_inside_of_checkpoint(save, capacity, backend):
    layer = make_layer([40])

    def inner(x, ids, probs, w1, w2):
        return uniep.moe(x * 1, ids, probs, w1, w2, save=save, capacity=capacity) * 1

    def block(x, ids, probs, w1, w2):
        return checkpoint(inner, x, ids, probs, w1, w2, use_reentrant=False) * 1

    assert_same(run_compiled(layer, block, backend), run_moe(layer, 0, layer.local(0, 1)))


@pytest.mark.parametrize("save", ["keep", "recompute"])
@pytest.mark.parametrize("option", ["capacity", "main_grad", "no_grad", None])
def test_inductor_parts_its_cuda_graphs_around_calls_that_they_can_not_hold(save, option):
    """Around ops with outputs of unknown sizes, which all of a layer without a capacity have."""
    from torch._dynamo.backends.common import aot_autograd

    layer, parts = make_layer([40]), []

    def note(graph, _):
        nodes = [node for node in graph.graph.nodes if "uniep." in str((node.target, *node.args[:1]))]
        parts.extend(bool(node.meta.get("unbacked_bindings")) for node in nodes if node.op == "call_function")
        return graph.forward

    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    options = {"save": save}
    if option == "capacity":
        options["capacity"] = (4096, 64)
    if option == "main_grad":
        options["main_grad"] = torch.zeros(w1.shape), torch.zeros(w2.shape)
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    run = torch.compile(lambda *given: uniep.moe(*given, **options), backend=backend, fullgraph=True)
    with torch.set_grad_enabled(option != "no_grad"):
        y = run(layer.x[0], layer.ids[0], layer.probs[0], w1, w2)
    if option != "no_grad":
        y.backward(layer.dy[0])
    assert parts == [option != "capacity"] * (1 if option == "no_grad" else 2)
    if hasattr(torch.Tag, "cudagraph_unsafe"):
        exchange = torch.ops.uniep.place, torch.ops.uniep.dispatch, torch.ops.uniep.combine
        assert all(torch.Tag.cudagraph_unsafe in op.default.tags for op in exchange)


def test_selective_checkpointing_keeps_the_op():
    """A policy that names uniep::forward: it runs once, and twice where the policy does not."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    calls = []
    run = uniep.call.Call.run

    def counted(self, *arguments, **options):
        calls.append(1)
        return run(self, *arguments, **options)

    def inner(x, ids, probs, w1, w2):
        return uniep.moe(torch.sin(x), ids, probs, w1, w2) * 1

    for saved, times in (([torch.ops.uniep.forward.default], 1), ([], 2)):
        torch._dynamo.reset()
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)

        def block(x, ids, probs, w1, w2, contexts=contexts):
            return checkpoint(inner, x, ids, probs, w1, w2, use_reentrant=False, context_fn=contexts)

        calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(uniep.call.Call, "run", counted)
            got = run_compiled(layer, block)
        assert len(calls) == times
        assert same_bits(got.dw2, run_compiled(layer, inner).dw2)
        assert got.y.shape == expected.y.shape


def test_modules_and_an_own_group():
    torch.manual_seed(1)
    with uniep.Group(workers=3) as group:
        layer = uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2, group=group)
        x = torch.randn(3, 16, 64).bfloat16()
        results = []
        # Inductor's own kernels would give the router other bits.
        for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            module.zero_grad()
            given = x.clone().requires_grad_()
            y = module(given)
            y.backward(torch.ones_like(y))
            grads = [parameter.grad.clone() for parameter in layer.parameters()]
            results.append([y.detach(), given.grad, *grads])
        for eager, compiled in zip(*results, strict=True):
            assert same_bits(eager, compiled)
        with torch.no_grad():
            assert same_bits(module(x), results[0][0])
    with pytest.raises(Exception, match="group: closed"), torch.no_grad():
        module(x)


def test_number_of_tokens_may_change():
    """One graph serves any T, also none."""

    def block(x, ids, probs, w1, w2):
        return uniep.moe(x * 1, ids, probs, w1, w2) * 1

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for tokens in (40, 24, 56, 7):
        layer = make_layer([tokens])
        assert_same(run_compiled(layer, block, counter, dynamic=True), run_moe(layer, 0, layer.local(0, 1)))
    assert counter.frame_count == 1
    layer = make_layer([0])
    assert_same(run_compiled(layer, block, counter, dynamic=True), run_moe(layer, 0, layer.local(0, 1)))


@pytest.mark.parametrize("frozen", [("w1",), ("w2",), ("w1", "w2"), ("x", "probs")])
def test_frozen_tensors_have_no_gradient(frozen):
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    given = {"x": layer.x[0], "probs": layer.probs[0], "w1": layer.w1, "w2": layer.w2}
    leaves = {name: value.clone().requires_grad_(name not in frozen) for name, value in given.items()}
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    compiled(leaves["x"], layer.ids[0], leaves["probs"], leaves["w1"], leaves["w2"]).backward(layer.dy[0])
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert same_bits(leaf.grad, getattr(expected, f"d{name}")), name


def test_one_tensor_an_expert():
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    w1, w2 = ([one.clone().requires_grad_() for one in weight] for weight in layer.local(0, 1))
    compiled = torch.compile(uniep.moe, fullgraph=True, backend="aot_eager")
    y = compiled(layer.x[0], layer.ids[0], layer.probs[0], w1, w2)
    y.backward(layer.dy[0])
    assert same_bits(y.detach(), expected.y)
    assert same_bits(torch.stack([one.grad for one in w1]), expected.dw1)
    assert same_bits(torch.stack([one.grad for one in w2]), expected.dw2)


@pytest.mark.parametrize("form", ["tensors", "lists", "pairs"])
@pytest.mark.parametrize("save", ["keep", "redispatch", "rows", "recompute"])
def test_gate_and_up_apart_and_dense_routing(form, save):
    layer, dense, halves = apart_and_dense()
    expected = run_moe(layer, 0, layer.local(0, 1))
    gates, ups = ([half] if form == "tensors" else [one.clone() for one in half] for half in halves)
    for one in (*gates, *ups):
        one.requires_grad_()
    w1 = {"tensors": (gates[0], ups[0]), "lists": (gates, ups), "pairs": list(zip(gates, ups, strict=True))}[form]
    x, probs, w2 = (one.clone().requires_grad_() for one in (layer.x[0], dense.probs, layer.w2))

    def block(x, routing_map, probs, w1, w2):
        return uniep.moe(x * 1, routing_map, probs, w1, w2, topk=2, save=save) * 1

    y = torch.compile(block, fullgraph=True, backend="aot_eager")(x, dense.routing_map, probs, w1, w2)
    y.backward(layer.dy[0])
    stack = torch.cat if form == "tensors" else torch.stack
    dw1 = torch.cat([stack([one.grad for one in half]) for half in (gates, ups)], 1)
    assert same_bits(probs.grad, dense_gradient(layer.ids[0], expected.dprobs, layer.experts))
    assert_same(Result(y.detach(), x.grad, expected.dprobs, dw1, w2.grad), expected)


def test_exchange_of_dense_routing():
    layer, dense, _ = apart_and_dense()

    def block(x, routing_map, probs):
        plan = uniep.place(routing_map, probs, num_experts=8, hidden=64, topk=2)
        rows, row_probs = uniep.dispatch(x * 1, plan)
        return uniep.combine(rows * 1, plan) * 1, row_probs * 2

    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        x, probs = layer.x[0].clone().requires_grad_(), dense.probs.clone().requires_grad_()
        y, row_probs = run(x, dense.routing_map, probs)
        torch.autograd.backward((y, row_probs), (layer.dy[0], torch.full_like(row_probs, 0.5)))
        results.append((y.detach(), row_probs.detach(), x.grad, probs.grad))
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)


def graph_breaks():
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def main_grad_weights(layer, form):
    """w1 and w2 as given to moe(), and all of them in a list; each with main_grad, of ones."""
    w1, w2 = layer.local(0, 1)
    if form == "apart":
        w1 = [half.contiguous() for half in w1.chunk(2, 1)]
    elif form == "lists":
        w1, w2 = list(w1.clone().unbind()), list(w2.clone().unbind())
    first, second = ([torch.nn.Parameter(one) for one in (w if isinstance(w, list) else [w])] for w in (w1, w2))
    for weight in (*first, *second):
        weight.main_grad = torch.ones(weight.shape)
    given = {"stacked": (first[0], second[0]), "apart": (tuple(first), second[0]), "lists": (first, second)}[form]
    return given, [*first, *second]


@pytest.mark.parametrize(
    ("form", "save", "frozen"),
    [("stacked", "keep", ()), ("lists", "redispatch", ()), ("apart", "recompute", ()), ("stacked", "keep", (0,))],
    ids=str,
)
def test_main_grad_is_in_the_graph(form, save, frozen):
    """Two micro-batches, both forwards before both backwards, so that main_grad changes between those of the second."""
    layers = [make_layer([40], seed=seed, unused=0.1) for seed in (1, 2)]
    results = []
    for compiling in (False, True):
        (w1, w2), weights = main_grad_weights(layers[0], form)
        told = []
        for number, weight in enumerate(weights):
            if number in frozen:
                weight.requires_grad_(False)
                continue
            weight.register_post_accumulate_grad_hook(
                lambda weight, told=told: told.append(weight.grad_added_to_main_grad)
            )

        def block(x, ids, probs, w1=w1, w2=w2):
            return uniep.moe(x * 1, ids, probs, w1, w2, main_grad="param", save=save) * 1

        torch._dynamo.utils.counters.clear()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        run = torch.compile(block, fullgraph=True, backend=counter) if compiling else block
        leaves = [(one.x[0].requires_grad_(), one.ids[0], one.probs[0].requires_grad_()) for one in layers]
        ys = [run(*one) for one in leaves]
        for y, one in zip(ys, layers, strict=True):
            y.backward(one.dy[0])
        assert told == [True] * 2 * (len(weights) - len(frozen))
        assert not any(weight.grad.any() for weight in weights if weight.requires_grad)
        assert (counter.frame_count, graph_breaks()) == (1 if compiling else 0, 0)
        gradients = [leaf.grad for x, _, probs in leaves for leaf in (x, probs)]
        results.append([*[y.detach() for y in ys], *gradients, *[weight.main_grad for weight in weights]])
        for x, _, probs in leaves:
            x.grad = probs.grad = None
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)
    for number in frozen:
        assert (results[1][number - len(weights)] == 1).all()


def test_main_grad_of_tensors_in_the_graph():
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    w1, w2 = (weight.requires_grad_() for weight in layer.local(0, 1))
    added = torch.zeros_like(w1, dtype=torch.float32), torch.zeros_like(w2, dtype=torch.float32)
    compiled = torch.compile(
        lambda x: uniep.moe(x * 1, layer.ids[0], layer.probs[0], w1, w2, main_grad=added) * 1,
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(layer.x[0]).backward(layer.dy[0])
    assert w1.grad is None and w2.grad is None
    assert same_bits(added[0].bfloat16(), expected.dw1)
    assert same_bits(added[1].bfloat16(), expected.dw2)


def test_main_grad_that_is_fetched_is_between_two_graphs():
    """As of Megatron-FSDP: what get_main_grad() gives is known in backward alone."""
    layer = make_layer([40])
    expected = run_moe(layer, 0, layer.local(0, 1))
    weights = [torch.nn.Parameter(one) for one in layer.local(0, 1)]
    added = [torch.zeros(one.shape) for one in weights]
    for weight, one in zip(weights, added, strict=True):
        weight.get_main_grad = lambda one=one: one

    def block(x):
        return uniep.moe(x * 1, layer.ids[0], layer.probs[0], *weights, main_grad="param") * 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(block, fullgraph=True, backend="aot_eager")(layer.x[0])
    torch.compile(block, backend="aot_eager")(layer.x[0]).backward(layer.dy[0])
    assert same_bits(added[0].bfloat16(), expected.dw1)
    assert same_bits(added[1].bfloat16(), expected.dw2)


def test_a_wrong_argument_is_named():
    layer = make_layer([8])
    compiled = torch.compile(uniep.moe, backend="aot_eager")
    with pytest.raises(ValueError, match="probs: torch.bfloat16; must be torch.float32"):
        compiled(layer.x[0], layer.ids[0], layer.probs[0].bfloat16(), layer.w1, layer.w2)
    with pytest.raises(ValueError, match="topk_ids.*9"):
        compiled(layer.x[0], torch.full_like(layer.ids[0], 9), layer.probs[0], layer.w1, layer.w2)


@pytest.mark.parametrize("inside", ["all", "exchange"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_exchange(inside, backend):
    """place(), dispatch() and combine() in one graph; and the last two with a plan from outside.

    Between them is what Inductor computes with eager's bits: one product.
    """
    layer = make_layer([40], unused=0.1)
    factor = torch.randn(64).bfloat16()

    def exchange(x, plan):
        rows, row_probs = uniep.dispatch(x * 1, plan)
        return uniep.combine(rows * factor, plan) * 1, row_probs * 2

    def block(x, ids, probs):
        plan = uniep.place(ids, probs, num_experts=8, hidden=64)
        return exchange(x, plan), plan.counts, plan.offsets

    results = []
    for compiling in (False, True):
        x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
        if inside == "all":
            run = torch.compile(block, fullgraph=True, backend=backend) if compiling else block
            (y, row_probs), counts, offsets = run(x, layer.ids[0], probs)
        else:
            plan = uniep.place(layer.ids[0], probs, num_experts=8, hidden=64)
            run = torch.compile(exchange, fullgraph=True, backend=backend) if compiling else exchange
            (y, row_probs), counts, offsets = run(x, plan), plan.counts, plan.offsets
        torch.autograd.backward((y, row_probs), (layer.dy[0], torch.full_like(row_probs, 0.5)))
        results.append((y.detach(), row_probs.detach(), counts, offsets, x.grad, probs.grad))
    for eager, compiled in zip(*results, strict=True):
        assert same_bits(eager, compiled)


def test_a_plan_from_a_graph_serves_outside():
    layer = make_layer([40])
    made = torch.compile(uniep.place, fullgraph=True, backend="aot_eager")(layer.ids[0], layer.probs[0], 8, 64)
    plan = uniep.place(layer.ids[0], layer.probs[0], 8, 64)
    assert made.rows == plan.rows
    rows, row_probs = uniep.dispatch(layer.x[0], made)
    expected, expected_probs = uniep.dispatch(layer.x[0], plan)
    assert same_bits(rows, expected)
    assert same_bits(row_probs, expected_probs)
    assert same_bits(uniep.combine(rows, made), uniep.combine(rows, plan))


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_a_memory_budget_makes_no_call_again(budget, monkeypatch):
    """By sizes, which differ from rank to rank, while the calls are collective."""
    made = []
    for name in ("forward", "backward", "dispatch", "combine"):
        own = getattr(uniep.engine.Engine, name)
        monkeypatch.setattr(
            uniep.engine.Engine,
            name,
            lambda *given, own=own, name=name, **named: made.append(name) or own(*given, **named),
        )
    monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", budget)
    layers = torch.nn.ModuleList(uniep.MoELayer(hidden=64, intermediate=32, num_experts=8, topk=2) for _ in range(2))

    def block(x, ids, probs):
        for layer in layers:
            x = x + torch.nn.functional.gelu(layer(x))
        plan = uniep.place(ids, probs, num_experts=8, hidden=64)
        return x + uniep.combine(torch.nn.functional.gelu(uniep.dispatch(x, plan)[0]), plan)

    for tokens in (16, 256):
        torch._dynamo.reset()
        made.clear()
        layer = make_layer([tokens])
        x, probs = layer.x[0].clone().requires_grad_(), layer.probs[0].clone().requires_grad_()
        compiled = torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)
        compiled(x, layer.ids[0], probs).float().square().mean().backward()
        assert sorted(made) == ["backward"] * 2 + ["combine"] * 2 + ["dispatch"] * 2 + ["forward"] * 2, made


# ---- torch's own checks: schema, fake kernels, autograd, and graphs with changing shapes


@pytest.fixture
def filled_memory():
    """They compare bytes of what is kept for backward, also of rows of padding, which hold what memory held before."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def op_arguments(save="keep", capacity=(0, 0), stacked=True):
    layer = make_layer([40])
    weights = layer.local(0, 1) if stacked else [list(weight.clone().unbind()) for weight in layer.local(0, 1)]
    first, second = ([weight] if stacked else [one.clone() for one in weight] for weight in weights)
    schedule = uniep.schedules.with_save("auto", save)
    options = (uniep.Group().name, schedule, schedule, *capacity, save, 2, False, "swiglu", "activation")
    return layer, [layer.x[0], layer.ids[0], layer.probs[0]], first, second, options


def apart_and_dense():
    """A layer, its map and probs [T, E], and w1 as the ops take it with gate and up apart."""
    layer, (dense,) = make_dense(make_layer([40], unused=0.1))
    return layer, dense, [half.contiguous() for half in layer.w1.chunk(2, 1)]


@pytest.mark.parametrize(
    ("save", "capacity", "stacked"),
    [
        ("keep", (0, 0), True),
        ("keep", (4096, 64), True),
        ("keep", (0, 0), False),
        ("redispatch", (0, 0), True),
        ("redispatch", (4096, 64), True),
        ("rows", (0, 0), True),
        ("rows", (4096, 64), True),
        ("recompute", (0, 0), True),
        ("recompute", (4096, 64), True),
    ],
)
def test_opcheck_forward(save, capacity, stacked, filled_memory):
    _, (x, ids, probs), w1, w2, options = op_arguments(save, capacity, stacked)
    for tensor in (x, probs, *w1, *w2):
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.uniep.forward, (x, ids, probs, w1, w2, [], [], [], *options, False, True))


def test_opcheck_gate_and_up_apart_and_dense_routing(filled_memory):
    layer, dense, w1 = apart_and_dense()
    probs = dense.probs.nan_to_num()
    options = (uniep.Group().name, "auto", "auto", 0, 0, "keep", 2, True, "swiglu", "activation")
    leaves = [one.requires_grad_() for one in (layer.x[0], probs, *w1, layer.w2)]
    torch.library.opcheck(
        torch.ops.uniep.forward,
        (leaves[0], dense.routing_map, probs, w1, [layer.w2], [], [], [], *options, False, True),
    )
    given = [one.detach() for one in w1]
    with torch.no_grad():
        inputs = layer.x[0], dense.routing_map, probs, given, [layer.w2], [], [], []
        _, saved = torch.ops.uniep.forward(*inputs, *options, False, True)
    weights = given, [layer.w2.detach()], [], []
    arguments = (layer.dy[0], None, dense.routing_map, probs.detach(), *weights, saved, *options)
    torch.library.opcheck(torch.ops.uniep.backward, (*arguments, True, True))


@pytest.mark.parametrize("save", ["keep", "redispatch"])
@pytest.mark.parametrize("need", [(True, True), (True, False), (False, True), (False, False)])
def test_opcheck_backward(save, need):
    layer, (x, ids, probs), w1, w2, options = op_arguments(save)
    _, saved = torch.ops.uniep.forward(x, ids, probs, w1, w2, [], [], [], *options, False, True)
    given = x if save == "redispatch" else None
    arguments = (layer.dy[0], given, ids, probs, w1, w2, [], [], saved, *options, *need)
    torch.library.opcheck(torch.ops.uniep.backward, arguments)


def op_biases(w1, w2):
    return [torch.ones(w1[0].shape[:2]).bfloat16()], [torch.ones(w2[0].shape[:2]).bfloat16()]


def test_opcheck_biases(filled_memory):
    layer, (x, ids, probs), w1, w2, options = op_arguments()
    b1, b2 = op_biases(w1, w2)
    arguments = (x, ids, probs, w1, w2, b1, b2, [], *options, False, True)
    _, saved = torch.ops.uniep.forward(*arguments)
    for tensor in (x, probs, *w1, *b2):
        tensor.requires_grad_()
    torch.library.opcheck(torch.ops.uniep.forward, arguments)
    given = [one.detach() for one in (probs, *w1, *w2, *b1, *b2)]
    own = (ids, given[0], *([one] for one in given[1:]), saved)
    torch.library.opcheck(torch.ops.uniep.backward, (layer.dy[0], None, *own, *options, True, True))


@pytest.mark.parametrize(
    ("has_biases", "need"),
    [
        (False, (True, True, False, False)),
        (False, (False, True, False, False)),
        (True, (True, True, True, True)),
        (True, (False, True, True, False)),
    ],
)
def test_opcheck_backward_into(has_biases, need):
    layer, (x, ids, probs), w1, w2, options = op_arguments()
    parts = w1, w2, *(op_biases(w1, w2) if has_biases else ([], []))
    _, saved = torch.ops.uniep.forward(x, ids, probs, *parts, [], *options, False, True)
    sums = [
        [torch.ones(one.shape) for one in weights] if needed else []
        for needed, weights in zip(need, parts, strict=True)
    ]
    arguments = (layer.dy[0], None, ids, probs, *parts, saved, *sums, *options, True)
    torch.library.opcheck(torch.ops.uniep.backward_into, arguments)


def test_opcheck_exchange():
    layer = make_layer([40])
    x, ids, probs = layer.x[0].requires_grad_(), layer.ids[0], layer.probs[0].requires_grad_()
    options = (8, 2, uniep.Group().name, 0, 0)
    torch.library.opcheck(torch.ops.uniep.place, (ids, probs.detach(), 64, *options))
    count = torch.ops.uniep.place(ids, probs.detach(), 64, *options)[2].shape[0]
    torch.library.opcheck(torch.ops.uniep.dispatch, (x, ids, probs, count, *options))
    rows = torch.ops.uniep.dispatch(x, ids, probs, count, *options)[0].detach()
    row_dprobs = torch.rand(count)
    torch.library.opcheck(torch.ops.uniep.combine, (rows, ids, probs.detach(), row_dprobs, *options))
    torch.library.opcheck(torch.ops.uniep.combine, (rows.requires_grad_(), ids, probs.detach(), None, *options))


def test_a_group_that_is_gone_is_named():
    _, (x, ids, probs), w1, w2, options = op_arguments()
    with pytest.raises(ValueError, match="group: there is none of the name 'nobody'"):
        torch.ops.uniep.forward(x, ids, probs, w1, w2, [], [], [], "nobody", *options[1:], False, True)


def test_a_graph_keeps_the_tuned_schedules_of_its_compilation():
    """So that its backward has the schedules of its forward, whatever is tuned later."""
    layer = make_layer([40])
    seen = []
    run = uniep.call.Call.run

    def noted(self, *arguments, **options):
        seen.append(self.schedules)
        return run(self, *arguments, **options)

    with uniep.Group(workers=2) as group, pytest.MonkeyPatch.context() as patch:
        patch.setattr(uniep.call.Call, "run", noted)
        group.tuned[uniep.tuning.key(64, 32, 8, 2)] = ("fusion=none", "fusion=pairs")
        compiled = torch.compile(
            lambda *tensors: uniep.moe(*tensors, group=group) * 1, fullgraph=True, backend="aot_eager"
        )
        given = layer.x[0], layer.ids[0], layer.probs[0], *layer.local(0, 1)
        first = compiled(*given)
        group.tuned.clear()
        assert same_bits(compiled(*given), first)
    assert seen == [(b"fusion=none", b"fusion=pairs")] * 2
