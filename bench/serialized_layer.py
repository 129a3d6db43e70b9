"""The layer, forward and backward, as a user would put it together without UniEP, part by part, on one GPU of a process group.

NCCL: all_to_all_single of the rows of all slots, in the order of their experts, then indexed into expert order; back the same way and
a sum of the slots. DeepEP: deep_ep's Buffer on 24 SMs, its chunk tuned. Backward keeps rows, z and a of forward, writes weight
gradients in bf16 and sends the router weights' gradients back, too. Routing is uniform or given, and what depends on it alone is made
before.
"""

import collections
import os
import statistics
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import expert_formulas

BF16 = torch.bfloat16
WARM_UP_CALLS = 5
WAIT_CYCLES = 2_000_000  # 1 ms
CALLS_UNDER_WAY = 8  # queued ahead, where GPUs do not meet
UNUSED = -1


# How tokens come to their experts' rows and back: dispatch(tokens) and combine(rows), or combine(rows, dprobs) for both gradients; and
# the rows' expert_formulas.Rows.
Way = collections.namedtuple("Way", "dispatch combine rows")
# DeepEP's dispatch and combine as they are, the Way that they make with permutations, and the layer on it.
DeepEp = collections.namedtuple("DeepEp", "dispatch combine way run")
# What join() has made, and the bytes outside of torch's allocator before it and for DeepEP's buffer.
Joined = collections.namedtuple("Joined", "buffer deep_ep bytes_before deepep_bytes")


@triton.jit
def sum_rows_kernel(rows, index, sums, hidden, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in range(SLOTS):
        source = tl.load(index + row * SLOTS + slot)
        if source >= 0:
            total += tl.load(rows + source * hidden + column, mask=column < hidden, other=0.0).to(tl.float32)
    tl.store(sums + row * hidden + column, total.to(tl.bfloat16), mask=column < hidden)


def sum_rows(rows, index):
    """[M, H] -> [N, H]: the sum of rows[index[n, k]] over the k that are used."""
    count, slots = index.shape
    hidden, columns = rows.size(1), 1024
    sums = torch.empty(count, hidden, device="cuda", dtype=BF16)
    sum_rows_kernel[(count, triton.cdiv(hidden, columns))](rows, index, sums, hidden, slots, columns)
    return sums


class Rank:
    """One GPU's share of a layer, and the ways to run it."""

    def __init__(self, rank, ranks, shape, tokens, warm_up=0.0, routing=None, formula="swiglu"):
        """`warm_up`: seconds that something runs for before its times count. `routing`: [ranks * tokens, topk] experts of all ranks'
        tokens, all slots used; else uniform. `formula`: of expert_formulas."""
        self.warm_up = warm_up
        self.formula = expert_formulas.FORMULAS[formula]
        self.hidden, inter, experts, self.topk = shape
        local = experts // ranks
        torch.manual_seed(rank + 1)
        rand = lambda *size: torch.randn(*size, device="cuda", dtype=BF16)
        self.tokens = tokens
        self.x = rand(tokens, self.hidden)
        self.inter, columns = inter, self.formula.halves * inter
        biases = (rand(local, columns), rand(local, self.hidden)) if self.formula.bias else ()
        self.weights = expert_formulas.Weights(rand(local, columns, self.hidden) * 0.02, rand(local, self.hidden, inter) * 0.02, *biases)
        self.dy = rand(tokens, self.hidden)
        if routing is None:
            self.ids = torch.rand(tokens, experts, device="cuda").topk(self.topk, dim=-1).indices
        else:
            self.ids = routing[rank * tokens:(rank + 1) * tokens].to("cuda", torch.long)
        self.probs = torch.full((tokens, self.topk), 1.0 / self.topk, device="cuda")
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.gate = torch.zeros(1, device="cuda")
        self.experts, self.local = experts, local
        self.route(rank, ranks)

    def route(self, rank, ranks):
        slots = self.ids.flatten()
        order = torch.argsort(slots, stable=True)
        counts = torch.bincount(slots, minlength=self.experts)
        all_counts = torch.empty(ranks, self.experts, device="cuda", dtype=torch.long)
        dist.all_gather_into_tensor(all_counts, counts)
        mine = all_counts[:, rank * self.local:(rank + 1) * self.local]
        self.sends = counts.view(ranks, self.local).sum(1).tolist()
        self.receives = mine.sum(1).tolist()
        self.rows = int(mine.sum())
        experts = torch.arange(self.local, device="cuda").repeat(ranks).repeat_interleave(mine.flatten())
        self.by_expert = torch.argsort(experts, stable=True)
        self.by_source = torch.argsort(self.by_expert)
        self.token_of_send = order // self.topk
        self.slot_of_token = torch.argsort(order).view(self.tokens, self.topk)
        self.ends = mine.sum(0).cumsum(0).to(torch.int32)
        probs = torch.empty(self.rows, device="cuda")
        dist.all_to_all_single(probs, self.probs.flatten()[order].contiguous(), self.receives, self.sends)
        self.rows_at_hand = expert_formulas.Rows(self.ends, experts[self.by_expert], probs[self.by_expert])

    def forward(self, way):
        rows, self.saved = self.formula.forward(self.weights, way.rows, way.dispatch(self.x))
        return way.combine(rows)

    def backward(self, way):
        """dx, dprobs, and gradients of weights, after a forward on the same way."""
        dxg, dprobs, *gradients = self.formula.backward(self.weights, way.rows, self.saved, way.dispatch(self.dy))
        return *way.combine(dxg, dprobs), *gradients

    def run_of(self, op, way):
        """What is timed: "forward", "backward" (of a forward that ran once), or "step", which is both."""
        def step():
            return self.forward(way), *self.backward(way)

        self.forward(way)
        return {"forward": lambda: self.forward(way), "backward": lambda: self.backward(way), "step": step}[op]

    def nccl_dispatch(self, values=None):
        received = torch.empty(self.rows, self.hidden, device="cuda", dtype=BF16)
        values = self.x if values is None else values
        dist.all_to_all_single(received, values[self.token_of_send], self.receives, self.sends)
        return received[self.by_expert]

    def nccl_combine(self, rows, dprobs=None):
        back = torch.empty(self.tokens * self.topk, self.hidden, device="cuda", dtype=BF16)
        dist.all_to_all_single(back, rows[self.by_source], self.sends, self.receives)
        sums = sum_rows(back, self.slot_of_token)
        if dprobs is None:
            return sums
        of_slots = torch.empty(self.tokens * self.topk, device="cuda")
        dist.all_to_all_single(of_slots, dprobs[self.by_source], self.sends, self.receives)
        return sums, of_slots[self.slot_of_token]

    def nccl(self, op="forward"):
        return self.run_of(op, Way(self.nccl_dispatch, self.nccl_combine, self.rows_at_hand))

    def gemms(self, op="forward"):
        """The GEMMs alone: two of forward, four of backward."""
        w1, w2, ends = self.weights.w1, self.weights.w2, self.ends
        xg, dyg = self.nccl_dispatch(), self.nccl_dispatch(self.dy) if op != "forward" else None
        rand = lambda columns: torch.randn(self.rows, columns, device="cuda", dtype=BF16)
        a, dz = rand(self.inter), rand(self.formula.halves * self.inter) if op != "forward" else None

        def forward():
            torch._grouped_mm(xg, w1.transpose(1, 2), offs=ends)
            torch._grouped_mm(a, w2.transpose(1, 2), offs=ends)

        def backward():
            torch._grouped_mm(dyg, w2, offs=ends)
            torch._grouped_mm(dz, w1, offs=ends)
            torch._grouped_mm(dyg.t(), a, offs=ends)
            torch._grouped_mm(dz.t(), xg, offs=ends)

        def step():
            forward()
            backward()

        return {"forward": forward, "backward": backward, "step": step}[op]

    def deepep(self, buffer, deep_ep, op="forward"):
        """DeepEP v1's dispatch and combine with a handle at hand, and the layer between them; the map from received rows to experts
        is made before."""
        layout = buffer.get_dispatch_layout(self.ids, self.experts)
        received, ids, weights, _, handle, _ = buffer.dispatch(
            self.x, topk_idx=self.ids, topk_weights=self.probs, num_tokens_per_rank=layout[0],
            num_tokens_per_expert=layout[2], is_token_in_rank=layout[3])
        row, slot = torch.nonzero(ids >= 0, as_tuple=True)
        experts = ids[row, slot]
        order = torch.argsort(experts, stable=True)
        rows = row[order].contiguous()
        ends = torch.bincount(experts, minlength=self.local).cumsum(0).to(torch.int32)
        of_rows = expert_formulas.Rows(ends, experts[order], weights[row, slot][order].float().contiguous())
        place = torch.full((received.size(0), self.topk), UNUSED, device="cuda", dtype=torch.long)
        place[row[order], slot[order]] = torch.arange(rows.numel(), device="cuda")
        configs = [deep_ep.Config(24, chunk, 512) for chunk in (4, 6, 8, 10, 16)]
        fastest = lambda run: min(configs, key=lambda config: self.median(lambda: run(config), 5, warm_up=0.0))
        out = fastest(lambda config: buffer.dispatch(self.x, handle=handle, config=config))
        back = fastest(lambda config: buffer.combine(received, handle, config=config))

        def dispatch(values=self.x):
            return buffer.dispatch(values, handle=handle, config=out)[0]

        def combine(sums=received):
            return buffer.combine(sums, handle, config=back)[0]

        def combine_rows(result, dprobs=None):
            sums = sum_rows(result, place)
            if dprobs is None:
                return combine(sums)
            weights = torch.zeros(received.size(0), self.topk, device="cuda")
            weights[row[order], slot[order]] = dprobs
            return buffer.combine(sums, handle, topk_weights=weights, config=back)[:2]

        way = Way(lambda values: dispatch(values)[rows], combine_rows, of_rows)
        return DeepEp(dispatch, combine, way, self.run_of(op, way))

    def peak_bytes(self, op, run):
        """Of torch's allocator, of all GPUs the most: what a run takes beside its results and what was there before: x, dy, weights
        and, of a backward, what forward kept."""
        if op != "backward":
            self.saved = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        results = results if isinstance(results, tuple) else (results,)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in results)
        most = torch.tensor(taken, device="cuda")
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return most.item()

    def median(self, run, repeat, warm_up=None):
        """Milliseconds, of each run the slowest GPU's. Without a warm-up all GPUs begin together, once the host has launched all, so
        that its time does not count; else each begins when its last run ends."""
        warm_up = self.warm_up if warm_up is None else warm_up
        meet = warm_up == 0
        ours, under_way = [], collections.deque()

        def end_calls(left):
            while len(under_way) > left:
                counts, begin, end = under_way.popleft()
                end.synchronize()
                if counts:
                    ours.append(begin.elapsed_time(end))

        dist.barrier()
        started, turn, warm = 0.0, 0, False
        while len(ours) + sum(counts for counts, _, _ in under_way) < repeat:
            end_calls(0 if meet else CALLS_UNDER_WAY - 1)
            if turn == WARM_UP_CALLS:  # what is compiled is
                torch.cuda.synchronize()
                started = time.monotonic()
            if not warm and turn >= WARM_UP_CALLS and (turn - WARM_UP_CALLS) % CALLS_UNDER_WAY == 0:
                warm = self.agrees(time.monotonic() - started >= warm_up)
            self.flush.zero_()  # out of the L2 cache
            if meet:
                dist.barrier()
                torch.cuda._sleep(WAIT_CYCLES)
                dist.all_reduce(self.gate)  # hosts leave the barrier tens of microseconds apart
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            begin.record()
            run()
            end.record()
            under_way.append((warm, begin, end))
            turn += 1
        end_calls(0)
        slowest = torch.tensor(ours, device="cuda")
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def agrees(self, mine):
        """Whether all ranks say so: they must do as many runs."""
        answer = torch.tensor(int(mine), device="cuda")
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer.item())


def bytes_outside_of_torch():
    """Of this GPU's memory, as the driver counts: NCCL's, DeepEP's, kernels', the context's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def join(rank, ranks, with_deepep=True):
    """Joins the process group on this rank's GPU, of the processes that one has spawned: a Joined, without DeepEP's buffer and module
    where it does not run."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getppid() % 10000))  # two scripts side by side differ
    torch.cuda.set_device(rank)
    before = bytes_outside_of_torch()
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    if not with_deepep:
        return Joined(None, None, before, 0)
    try:
        import deep_ep
        deep_ep.Buffer.set_num_sms(24)
        without = bytes_outside_of_torch()
        buffer = deep_ep.Buffer(dist.group.WORLD, int(2e9), 0)
        return Joined(buffer, deep_ep, before, bytes_outside_of_torch() - without)
    except Exception as error:
        if rank == 0:
            print("deepep is left out:", repr(error)[:120], flush=True)
        return Joined(None, None, before, 0)


def leave():
    dist.barrier()
    dist.destroy_process_group()
