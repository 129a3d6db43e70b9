"""One call of the layer, as its autograd.Function and the custom ops both run it."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Sequence

import torch

from uniep import late_errors, library, rerun, trials
from uniep.addresses import addresses, aligned
from uniep.engine import text_of
from uniep.group import Group
from uniep.layer_stats import spans, watch
from uniep.numerics import PLAIN, Numerics
from uniep.routes import Agreed, Route, place_routing
from uniep.schedules import SAVES

_Made = typing.TypeVar("_Made")


class Call(typing.NamedTuple):
    """What one call was asked for, beside its tensors: it lives from forward to backward, and weights may be copies."""

    group: Group
    shape: tuple[int, int, int]  # H, I, E
    schedules: tuple[bytes, bytes]
    topk: int
    capacity: tuple[int, int] | None
    save: str
    apart: bool  # w1 is all gates, then all ups
    counts: tuple[int, ...]  # of tensors: of w1, w2, b1 and b2
    main_grad: typing.Literal["param"] | tuple[list[torch.Tensor], ...] | None = None
    grad_dtype: torch.dtype = torch.bfloat16  # of gradients of weights, without main_grad
    numerics: Numerics = PLAIN
    parameters: tuple[list[torch.Tensor], ...] = ()  # w1, w2, b1 and b2 with main_grad "param", which has it from them
    layer: str = ""  # its name, if it has one
    places_anew: bool = False  # in backward, as graphs do

    @property
    def name(self) -> str:
        """The layer's; its shape where it has none."""
        hidden, intermediate, experts = self.shape
        return self.layer or f"H {hidden}, I {intermediate}, E {experts}, K {self.topk}"

    @property
    def sends_x(self) -> bool:
        """Whether backward needs x, since no rows of it are kept."""
        return SAVES[self.save].sends_x

    @property
    def weight_gradient(self) -> int:
        """UNIEP_WEIGHT_GRADIENT_..."""
        if self.main_grad is not None:
            return library.WEIGHT_GRADIENT_MAIN_GRAD
        return library.WEIGHT_GRADIENT_BF16 if self.grad_dtype is torch.bfloat16 else library.WEIGHT_GRADIENT_FP32

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor, weights: Sequence[torch.Tensor], keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Route]:
        """y in the shape of x, what is kept for backward (nothing unless `keep`), and the placed routing."""
        route = self.place(ids, probs)
        route.spans = spans()
        rows, lacking = self.made(lambda: route.send(rows_of(x)), x)
        trial = trials.plan(self, "forward", route)
        with watch(self, "forward", route, trial.schedule or self.schedules[0]), trial:
            y, saved = self.group.engine.forward(
                route.config(numerics=self.numerics),
                trial.schedule or self.schedules[0],
                route.placement,
                rows,
                addresses(self.parts(weights), self.apart),
                keep,
                lacking,
            )
        verifier = rerun.watcher
        is_due = verifier is not None and verifier.due(self, "forward")
        route.keeps_arrived = is_due or rerun.running
        total = shaped(route.sum_slots(y), x.shape)
        if verifier is not None:
            inputs = rows_of(x), rows_of(ids), rows_of(probs)
            if is_due:
                verifier.after_forward(self, *inputs, weights, route, rows_of(total))
                route.arrived = None
            route.verified = inputs if verifier.due(self, "backward") else None
        return total, saved, route

    def made(self, make: Callable[[], _Made], stand_in: _Made) -> tuple[_Made, str]:
        """What `make` makes for a call of the library, and "". Without memory for it the stand-in and the error's text:
        that call raises it when the other ranks know, and reads and writes nothing."""
        try:
            return make(), ""
        except torch.OutOfMemoryError as error:
            if self.group.engine.ranks == 1:  # nobody else is in a call of the library
                raise
            return stand_in, text_of(error)

    def place(self, ids: torch.Tensor, probs: torch.Tensor) -> Route:
        agreed = Agreed(self.save, self.places_anew)
        given = rows_of(ids), rows_of(probs), self.topk, self.capacity, agreed
        return place_routing(self.group, self.shape, *given)

    def run_backward(
        self,
        route: Route,
        saved: torch.Tensor,
        x: torch.Tensor | None,
        dy: torch.Tensor,
        weights: Sequence[torch.Tensor],
        dw1: Sequence[torch.Tensor] | None,
        dw2: Sequence[torch.Tensor] | None,
        db1: Sequence[torch.Tensor] | None = None,
        db2: Sequence[torch.Tensor] | None = None,
        *,
        lacking: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dx in the shape of dy, and dprobs [T, K] or of a map [T, E]; writes dw1 and dw2, and with them db1 and db2.

        Needs x where `sends_x`. `lacking`: of made() for the gradients.
        """
        late_errors.note_call(self.group, self.capacity)
        verifier, inputs = rerun.watcher, route.verified
        is_due = verifier is not None and inputs is not None and verifier.due(self, "backward")
        if verifier is not None and is_due and not lacking:
            verifier.before_backward(self, dw1, dw2)
        route.spans = spans()
        (dprobs, rows, x_rows), more = self.made(lambda: self._backward_inputs(route, dy, x), (dy, dy, x))
        given = weights  # copies of hooks may lie anywhere
        weights, no_copy = self.made(lambda: [aligned(weight) for weight in given], given)
        lacking = lacking or more or no_copy
        trial = trials.plan(self, "backward", route)
        schedules = self.schedules if trial.schedule is None else (self.schedules[0], trial.schedule)
        with watch(self, "backward", route, schedules[1]), trial:
            dx = self.group.engine.backward(
                route.config(self.weight_gradient, self.numerics),
                schedules,
                route.placement,
                saved,
                rows,
                x_rows,
                addresses(self.parts(weights), self.apart),
                dprobs,
                addresses((dw1, dw2, db1, db2), self.apart),
                lacking,
            )
        # Collective, so whoever needs them.
        route.keeps_arrived = is_due or rerun.running
        total, all_dprobs = shaped(route.sum_slots(dx), dy.shape), route.gather_probs(dprobs)
        if verifier is not None and inputs is not None and is_due:
            given = inputs[0], rows_of(dy), *inputs[1:]
            verifier.after_backward(self, *given, weights, route, rows_of(total), all_dprobs, dw1, dw2)
            route.arrived = None
        route.verified = None
        return total, all_dprobs

    def _backward_inputs(
        self, route: Route, dy: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Memory for dprobs, and rows of dy and x."""
        dprobs = self.group.engine.probs_gradient(route.engine_tokens)
        return dprobs, route.send(rows_of(dy)), None if x is None else route.send(rows_of(x))

    def split(self, weights: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """w1 and w2."""
        first, second, *_ = self.parts(weights)
        return first, second

    def parts(self, weights: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """w1, w2, b1 and b2; no entries in the last two where there are no biases."""
        first, second, third, _ = itertools.accumulate(self.counts)
        return weights[:first], weights[first:second], weights[second:third], weights[third:]


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., columns] as contiguous [T, columns], where GPUs take it: a dy may be a view into a larger gradient."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return aligned(tensor if tensor.is_contiguous() else tensor.contiguous())


def shaped(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The tensor [T, columns] with the leading sizes that a shape has."""
    return tensor if len(shape) == 2 else tensor.view(shape)
