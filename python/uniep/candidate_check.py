"""Whether a schedule gives the bytes that another one gives, on a layer's own sizes and inputs of the check's own."""

from __future__ import annotations

import functools
import time
import typing

import torch

from uniep import library
from uniep.rerun import tile_sums, unwatched
from uniep.together import make_together, run_together

if typing.TYPE_CHECKING:
    from uniep.call import Call
    from uniep.routes import Route

_SHARE = 8  # of the tokens
_SEED = 17
_NEEDS = "it needs more memory"
_NO_ROOM = "a rank has no room to check it"


class CandidateCheck:
    """One kind of layer: all calls of the same key.

    Attributes:
        call: without the weights of the job.
        tokens: the most that the library's rank had in a call.
    """

    def __init__(self, call: Call, route: Route) -> None:
        self.key = self.key_of(call)
        self.call = call._replace(main_grad=None, parameters=(), capacity=None)
        self.weight_gradient = call.weight_gradient
        self.config = route.config(call.weight_gradient, call.numerics)
        self.tokens = self.rank_tokens = 0
        hidden, intermediate, experts = call.shape
        self.name = f"H {hidden}, I {intermediate}, E {experts}, K {call.topk}"

    @staticmethod
    def key_of(call: Call) -> typing.Any:
        """Equal on all ranks for calls that are compared with each other."""
        own = call.shape, call.topk, call.save, call.apart, tuple(call.numerics), call.weight_gradient
        return *own, call.schedules, call.capacity is None

    def note(self, route: Route) -> None:
        self.tokens = max(self.tokens, route.tokens)
        self.rank_tokens = max(self.rank_tokens, route.rank_tokens)

    @unwatched
    def check(self, direction: str, candidate: bytes, incumbent: bytes) -> tuple[bool, str, float]:
        """Whether all bytes are equal; why it is no candidate here, or ""; milliseconds that it took. Collective.

        Raises, on all ranks alike, what the run of the candidate on one of them did, or the incumbent's where that is
        not a lack of memory. Then the group has recovered.
        """
        begin = time.perf_counter()
        inputs = make_together(self.call.group, functools.partial(self._inputs, direction))
        if inputs is None:
            return False, _NO_ROOM, 0.0
        try:
            expected, needed = self._run_together(direction, incumbent, inputs)
        except MemoryError:
            return False, _NO_ROOM, 1e3 * (time.perf_counter() - begin)
        seen, needs = self._run_together(direction, candidate, inputs)
        more = any(one > other for one, other in zip(needs, needed, strict=True))
        equal = all(map(torch.equal, seen, expected))
        return equal, _NEEDS if more else "", 1e3 * (time.perf_counter() - begin)

    def _inputs(self, direction: str) -> dict[str, typing.Any]:
        call = self.call
        hidden, intermediate, experts = call.shape
        device, local = call.group.device, experts // call.group.size
        tokens = max(1, self.rank_tokens // _SHARE)
        generator = torch.Generator(device=device).manual_seed(_SEED + call.group.rank)

        def values(*sizes: int) -> torch.Tensor:
            return (torch.rand(sizes, device=device, generator=generator) - 0.5).bfloat16()

        scores = torch.rand(tokens, experts, device=device, generator=generator)
        probs, ids = scores.topk(call.topk)
        rows = intermediate if call.apart or not call.numerics.gated else 2 * intermediate
        count = 2 * local if call.apart else local
        # Experts share a tensor; their gradients have one each.
        weights = [[values(rows, hidden)] * count, [values(hidden, intermediate)] * local]
        if call.numerics.bias:
            weights += [[values(intermediate * (2 if call.numerics.gated else 1))] * local, [values(hidden)] * local]
        else:
            weights += [[], []]
        made: dict[str, typing.Any] = {"x": values(tokens, hidden), "ids": ids, "probs": probs, "weights": weights}
        if direction == "backward":
            kind = torch.bfloat16 if self.weight_gradient == library.WEIGHT_GRADIENT_BF16 else torch.float32
            made["dy"] = values(tokens, hidden)
            made["dw"] = [[torch.empty_like(one, dtype=kind) for one in own] for own in weights]
        return made

    def _run_together(
        self, direction: str, schedule: bytes, inputs: dict[str, typing.Any]
    ) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        run = functools.partial(self._run, direction, schedule, inputs)
        return run_together(self.call.group, run, "whether a schedule ran on the ranks")

    def _run(
        self, direction: str, schedule: bytes, inputs: dict[str, typing.Any]
    ) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        parts = inputs["weights"]
        weights = [weight for part in parts for weight in part]
        call = self.call._replace(counts=tuple(map(len, parts)))
        is_forward = direction == "forward"
        schedules = (schedule, call.schedules[1]) if is_forward else (call.schedules[0], schedule)
        call = call._replace(schedules=schedules)
        if not is_forward and self.weight_gradient == library.WEIGHT_GRADIENT_MAIN_GRAD:
            call = call._replace(main_grad=tuple(inputs["dw"]))
        y, saved, route = call.run(inputs["x"], inputs["ids"], inputs["probs"], weights, keep=not is_forward)
        results = [y]
        if not is_forward:
            for one in (gradient for own in inputs["dw"] for gradient in own):
                one.zero_()
            x = inputs["x"] if call.sends_x else None
            results = [*call.run_backward(route, saved, x, inputs["dy"], weights, *inputs["dw"])]
            results += [gradient for own in inputs["dw"] for gradient in own]
        number = library.FORWARD if is_forward else library.BACKWARD
        config = route.config(self.weight_gradient, call.numerics)
        need = call.group.engine.memory_need(config, number, schedule, route.placement)
        return [tile_sums(one.reshape(-1, one.shape[-1])) for one in results], need
