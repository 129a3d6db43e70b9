"""Wrong ranks are found and named, and no others. distributed_checks.py runs these, too."""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import uniep
from conftest import BUILD
from distributed_checks import run_checks
from layers import Layer, assert_same, make_dense, make_layer, random_layer, run_moe, same_bits
from uniep import rerun, routes
from uniep.engine import Engine

BIT = 1 << 12  # of a bf16's exponent


def flip(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.view(-1)[:1].view(torch.int16).bitwise_xor_(BIT)


@contextlib.contextmanager
def wrong(owner, name: str, is_here: bool, pick=lambda result: result, always: bool = False):
    """A function whose result has one wrong bit on one rank: in the job's own calls, or also in the verifier's."""
    original = getattr(owner, name)
    calls = []

    def changed(*arguments, **named):
        result = original(*arguments, **named)
        if is_here and (always or rerun.watcher is not None):
            calls.append(name)
            flip(pick(result))
        return result

    setattr(owner, name, changed)
    try:
        yield calls
    finally:
        setattr(owner, name, original)


def step(verifier: uniep.Verifier, layer: Layer, rank: int, ranks: int, **options) -> list[uniep.Finding]:
    run_moe(layer, rank, layer.local(rank, ranks), **options)
    return verifier.step()


def gathered(found: list[uniep.Finding]) -> list[list[uniep.Finding]]:
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return everywhere


def the_only(found: list[uniep.Finding]) -> uniep.Finding:
    everywhere = gathered(found)
    assert all(each == found for each in everywhere)
    assert len(found) == 1, found
    return found[0]


def check_no_false_alarm(rank: int, ranks: int) -> None:
    counts = {"forward": 0, "backward": 0, "main_grad": 0, "redispatch": 0, "recompute": 0}
    for seed in range(12):
        layer = random_layer(seed, ranks)
        weights = layer.local(rank, ranks)
        save = ("keep", "redispatch", "rows", "recompute")[seed % 4]
        without = run_moe(layer, rank, weights, save=save)
        with uniep.Verifier(every=1, budget=1) as verifier:
            for direction in ("forward", "backward"):
                assert_same(run_moe(layer, rank, weights, save=save), without)
                assert verifier._noted is not None and verifier._noted.direction == direction
                assert not verifier.step()
                counts[direction] += 1
                counts[save] = counts.get(save, 0) + 1
            assert verifier.checks == 2
    for seed in range(6):
        layer = random_layer(seed, ranks)
        x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
        w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
        added = tuple(torch.rand(weight.shape) for weight in (w1, w2))
        with uniep.Verifier(every=1, budget=1) as verifier:
            for _ in range(4):  # two backward checks
                uniep.moe(x, layer.ids[rank], probs, w1, w2, main_grad=added).backward(layer.dy[rank])
                if verifier._noted.direction == "backward":
                    assert verifier._noted.gradients
                    counts["main_grad"] += 1
                assert not verifier.step()
    assert all(counts.values()), counts


def check_what_was_noted_before_an_error_is_dropped(rank: int, ranks: int) -> None:
    """It may be what no result is; the step is repeated."""
    layer = random_layer(1, ranks)
    weights = layer.local(rank, ranks)
    with uniep.Verifier(every=1, budget=1) as verifier:
        run_moe(layer, rank, weights)
        for sums in verifier._noted.made.values():
            sums += 1
        uniep.Group().recover()
        run_moe(layer, rank, weights)
        assert verifier._noted is not None and not verifier.step() and verifier.checks == 1


def check_a_checkpoint_that_routes_otherwise(rank: int, ranks: int) -> None:
    layer = make_layer([40 + rank for rank in range(ranks)])
    x, ids = layer.x[rank].clone().requires_grad_(), layer.ids[rank]
    weights = [weight.requires_grad_() for weight in layer.local(rank, ranks)]
    directions = []
    with uniep.Verifier(every=1, budget=1) as verifier:
        for _ in range(4):
            order = [ids, ids.roll(1, 0).contiguous()]

            def block(x, order=order):
                return uniep.moe(x * 1, order.pop(0), layer.probs[rank], *weights)

            checkpoint(block, x, use_reentrant=False).backward(layer.dy[rank])
            directions.append(verifier._noted.direction)
            assert not verifier.step()
    assert set(directions) == {"forward", "backward"}


def check_maps_and_halves(rank: int, ranks: int) -> None:
    for seed in range(6):
        layer, dense = make_dense(random_layer(seed, ranks))
        w1, w2 = layer.local(rank, ranks)
        gate, up = (half.contiguous().requires_grad_() for half in w1.chunk(2, 1))
        w2.requires_grad_()
        x, probs = layer.x[rank].clone().requires_grad_(), dense[rank].probs.clone().requires_grad_()
        with uniep.Verifier(every=1, budget=1) as verifier:
            for _ in range(2):
                y = uniep.moe(x, dense[rank].routing_map, probs, (gate, up), w2, topk=layer.ids[rank].shape[1])
                y.backward(layer.dy[rank])
                assert not verifier.step()
            assert verifier.checks == 2


def check_wrong_rows_sums_and_gradients(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=ranks, topk=min(2, ranks))
    places = [
        (Engine, "forward", lambda result: result[0], 0),
        (routes.Route if ranks == 1 else routes.TorchRoute, "sum_slots", lambda result: result, 0),
        (Engine, "backward", lambda result: result, 1),
        (routes.Route if ranks == 1 else routes.TorchRoute, "sum_slots", lambda result: result, 1),
    ]
    for bad in range(ranks):
        for owner, name, pick, turn in places:
            with uniep.Verifier(every=1, budget=1) as verifier:
                if turn == 1:
                    assert not step(verifier, layer, rank, ranks)
                with wrong(owner, name, rank == bad, pick) as calls:
                    finding = the_only(step(verifier, layer, rank, ranks))
                assert bool(calls) == (rank == bad)
                assert finding.kind == "wrong rank" and finding.rank == bad, finding
                assert finding.direction == ("forward", "backward")[turn]
                assert f"rank {bad} (cpu engine, host " in finding.message


def check_wrong_weight_gradient(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=ranks, topk=min(2, ranks))
    original = Engine.backward
    here: list[torch.Tensor] = []

    def backward(*arguments, **named):
        dx = original(*arguments, **named)
        if rerun.watcher is not None:
            for values in here:
                flip(values)
        return dx

    for bad in range(ranks):
        with uniep.Verifier(every=1, budget=1) as verifier:
            assert not step(verifier, layer, rank, ranks)
            x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
            w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
            added = tuple(torch.zeros(weight.shape) for weight in (w1, w2))
            half = added[1].view(-1)[:1].view(torch.bfloat16)[1:]  # the upper one of an fp32
            here[:] = [half] if rank == bad else []
            Engine.backward = backward
            try:
                uniep.moe(x, layer.ids[rank], probs, w1, w2, main_grad=added).backward(layer.dy[rank])
            finally:
                Engine.backward = original
            finding = the_only(verifier.step())
            assert finding.kind == "wrong rank" and finding.rank == bad and finding.tensor == "dw2", finding
            assert finding.expert == bad


def check_a_rank_that_is_always_wrong(rank: int, ranks: int) -> None:
    layer = make_layer([40] * ranks, experts=2 * ranks, topk=2)
    with uniep.Verifier(every=1, budget=1) as verifier, wrong(Engine, "forward", rank == 0, lambda y: y[0], True):
        found = step(verifier, layer, rank, ranks)
        if ranks == 4:
            finding = the_only(found)
            assert finding.kind == "wrong rank" and finding.rank == 0, finding
        elif found:  # of two ranks nobody can tell, and one rank agrees with itself
            assert ranks == 2 and finding_names(found) <= {0, 1}, found


def finding_names(found: list[uniep.Finding]) -> set[int]:
    return {rank for one in found for rank in (one.suspects or (one.rank,))}


def check_memory_and_inputs(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    bad = ranks - 1
    for everywhere in (False, True):
        weights = layer.local(rank, ranks)
        with uniep.Verifier(every=1, budget=1) as verifier:
            w1, w2 = (weight.requires_grad_() for weight in weights)
            uniep.moe(layer.x[rank].clone().requires_grad_(), layer.ids[rank], layer.probs[rank], w1, w2)
            with torch.no_grad():
                if everywhere:
                    w1.mul_(0.5)
                elif rank == bad:
                    flip(w1.view(-1)[-1:])
            finding = the_only(verifier.step())
            if everywhere:
                assert finding.kind == "inputs changed" and finding.rank == -1, finding
            else:
                assert finding.kind == "memory changed" and finding.rank == bad and finding.tensor == "w1", finding
                assert finding.expert == 2 * ranks - 1 and finding.row == len(w1[0]) - 1, finding


def check_inputs_that_are_freed(rank: int, ranks: int) -> None:
    """As FSDP2 does behind a layer, here on one rank: nothing is checked, and nobody waits."""
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    with uniep.Verifier(every=1, budget=1) as verifier:
        w1, w2 = layer.local(rank, ranks)
        uniep.moe(layer.x[rank], layer.ids[rank], layer.probs[rank], w1, w2)
        if rank == ranks - 1:
            w1.untyped_storage().resize_(0)
        assert verifier.step() == [] and verifier.checks == 0
        # As Megatron does with a norm's output that an evaluation leaves behind.
        x = layer.x[rank].clone()
        uniep.moe(x, layer.ids[rank], layer.probs[rank], *layer.local(rank, ranks))
        if rank == 0:
            x.untyped_storage().resize_(0)
        assert verifier.step() == [] and verifier.checks == 0
        assert step(verifier, layer, rank, ranks) == [] and verifier.checks == 1


def check_a_group_that_was_aborted(rank: int, ranks: int) -> None:
    """A restart in the process, behind which one rank has made a step more."""
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    with uniep.Verifier(every=1, budget=1) as verifier:
        for _ in range(2):
            processes = dist.new_group()
            group = uniep.Group(processes)
            assert not step(verifier, layer, rank, ranks, group=group)
            run_moe(layer, rank, layer.local(rank, ranks), group=group)
            assert verifier._noted.direction == "backward"
            group.abort()
            dist.destroy_process_group(processes)
            if rank == 0:
                assert verifier.step() == []
        assert verifier.checks == 2


def check_a_restart_behind_a_finding(rank: int, ranks: int) -> None:
    """All ranks find the same, also beside one whose process is new, and name the same step."""
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    verifier = uniep.Verifier(every=1, budget=1, folder=shared[0])
    files = set()
    for life in range(2):
        processes = dist.new_group()
        group = uniep.Group(processes)
        with wrong(Engine, "forward", rank == 0, lambda result: result[0]):
            finding = the_only(step(verifier, layer, rank, ranks, group=group))
        assert finding.kind == "wrong rank" and pathlib.Path(finding.file).exists(), finding
        files.add(finding.file)
        group.abort()
        dist.destroy_process_group(processes)
        if life == 0 and rank == 0:
            assert verifier.step() == []
        if life == 0 and rank == ranks - 1:
            verifier.close()
            verifier = uniep.Verifier(every=1, budget=1, folder=shared[0])
            verifier.steps = 5
    verifier.close()
    dist.barrier()
    if rank == 0:
        assert len(files) == 2 and len(list(pathlib.Path(shared[0]).iterdir())) == 4, files
        shutil.rmtree(shared[0])


@contextlib.contextmanager
def without_memory(name: str, is_here: bool, at: int = 1):
    """The first time, or the one named, that a function of uniep.rerun is called it has no memory."""
    original = getattr(rerun, name)
    calls = []

    def changed(*arguments, **named):
        calls.append(name)
        if is_here and len(calls) == at:
            raise torch.OutOfMemoryError("no room")
        return original(*arguments, **named)

    setattr(rerun, name, changed)
    try:
        yield calls
    finally:
        setattr(rerun, name, original)


def check_a_rank_without_memory_is_not_checked(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    main_grad = tuple(torch.zeros(weight.shape) for weight in layer.local(rank, ranks))
    places = ("forward_sums", "note", "_Moved", "backward_sums", "expert_gradients", "changed_inputs")
    for place in places:
        with uniep.Verifier(every=1, budget=1) as verifier:
            with without_memory(place, rank == ranks - 1) as calls:
                for _ in range(2):  # forward and backward
                    x, probs = layer.x[rank].clone().requires_grad_(), layer.probs[rank].clone().requires_grad_()
                    w1, w2 = (weight.requires_grad_() for weight in layer.local(rank, ranks))
                    uniep.moe(x, layer.ids[rank], probs, w1, w2, main_grad=main_grad).backward(layer.dy[rank])
                    assert verifier.step() == []
            assert calls and verifier.checks == 1, (place, calls, verifier.checks)
            assert step(verifier, layer, rank, ranks) == [] and verifier.checks == 2


def check_a_finding_without_memory_for_a_third_run_names_all_ranks(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    with (
        uniep.Verifier(every=1, budget=1) as verifier,
        without_memory("_Moved", rank == ranks - 1, at=2),
        wrong(Engine, "forward", rank == 0, lambda result: result[0]),
    ):
        finding = the_only(step(verifier, layer, rank, ranks))
    assert finding.kind == "wrong rank, undecided" and finding.suspects == tuple(range(ranks)), finding
    assert "no memory for a third" in finding.message and verifier.checks == 1, finding


def check_a_finding_stays_where_inputs_have_no_memory(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    with (
        uniep.Verifier(every=1, budget=1, folder=shared[0]) as verifier,
        without_memory("_bytes", rank == ranks - 1),
        wrong(Engine, "forward", rank == 0, lambda result: result[0]),
    ):
        finding = the_only(step(verifier, layer, rank, ranks))
    assert f"; inputs were not written: rank {ranks - 1}: no room" in finding.message, finding
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared[0])


def check_closing_behind_a_finding(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    for before_optimizer in (False, True):
        verifier = uniep.Verifier(every=1, budget=1, before_optimizer=before_optimizer)
        verifier.on_finding = lambda _, verifier=verifier: verifier.close()
        with wrong(Engine, "forward", rank == 0, lambda result: result[0]):
            run_moe(layer, rank, layer.local(rank, ranks))
        if before_optimizer:
            torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
        else:
            verifier.step()
        assert verifier.findings == 1 and verifier.closed and rerun.watcher is None
        run_moe(layer, rank, layer.local(rank, ranks))
        assert verifier._noted is None
        with uniep.Verifier(every=1, budget=1) as another:
            assert step(another, layer, rank, ranks) == [] and another.checks == 1


def check_nan_is_no_wrong_rank(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    layer.x[0][3, 5] = torch.nan
    with uniep.Verifier(every=1, budget=1) as verifier:
        finding = the_only(step(verifier, layer, rank, ranks))
        assert finding.kind == "not finite" and finding.rank == -1, finding


def check_inputs_are_replayed(rank: int, ranks: int) -> None:
    """By `uniep run`, on one rank and on as many as there were."""
    if not (BUILD / "uniep").exists():
        print(f"check_inputs_are_replayed: skipped, {BUILD}/uniep is not built")
        return
    layer = make_layer([5 + each for each in range(ranks)], experts=2 * ranks, topk=2, unused=0.2)
    expected = run_moe(layer, rank, layer.local(rank, ranks))
    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = pathlib.Path(shared[0])
    try:
        with uniep.Verifier(every=1, budget=1, folder=folder) as verifier:
            assert not step(verifier, layer, rank, ranks)
            with wrong(Engine, "backward", rank == 0):
                finding = the_only(step(verifier, layer, rank, ranks))
        parts = [None] * ranks
        dist.all_gather_object(parts, expected.dx)
        if rank == 0:
            content = pathlib.Path(finding.file).read_bytes()
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            line = [f"{BUILD}/uniep", *header["__metadata__"]["replay"].split()[1:]]
            subprocess.run([*line, "--engine", "cpu", "--out", f"{folder}/out.safetensors", "--json", "-"], check=True)
            out = (folder / "out.safetensors").read_bytes()
            begin = 8 + int.from_bytes(out[:8], "little")
            first, last = json.loads(out[8:begin])["dx"]["data_offsets"]
            got = torch.frombuffer(bytearray(out[begin + first : begin + last]), dtype=torch.bfloat16)
            assert same_bits(got, torch.cat(parts).view(-1))
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)


def check_a_finding_stays_where_inputs_can_not_be_written(rank: int, ranks: int) -> None:
    layer = make_layer([24] * ranks, experts=2 * ranks, topk=2)
    shared = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    with uniep.Verifier(every=1, budget=1, folder=shared[0]) as verifier:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(shared[0])
        with wrong(Engine, "forward", rank == 0, lambda result: result[0]):
            finding = the_only(step(verifier, layer, rank, ranks))
    assert finding.file == "" and "; inputs were not written: rank 0: " in finding.message, finding


def check_turns_and_budget(rank: int, ranks: int) -> None:
    layer = make_layer([8] * ranks, experts=ranks, topk=1)
    with uniep.Verifier(every=3, budget=1) as verifier:
        for number in range(1, 8):
            step(verifier, layer, rank, ranks)
            assert verifier.checks == number // 3
    with uniep.Verifier(every=1, budget=1e-9) as verifier:
        for _ in range(5):
            step(verifier, layer, rank, ranks)
        assert verifier.checks == 1


def check_refusals(rank: int, ranks: int) -> None:
    for wrong_argument in ({"every": 0}, {"budget": 0}, {"budget": float("nan")}, {"folder": "/nowhere"}):
        try:
            uniep.Verifier(**wrong_argument)
        except ValueError as error:
            assert next(iter(wrong_argument)) in str(error)
        else:
            raise AssertionError(wrong_argument)
    with uniep.Verifier():
        try:
            uniep.Verifier()
        except ValueError as error:
            assert "close()" in str(error)
        else:
            raise AssertionError("two verifiers")


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
