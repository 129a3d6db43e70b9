"""The module that calls moe() with the parameters of Megatron's experts."""

from __future__ import annotations

import typing

import torch
import torch.distributed as dist

from uniep import reserved_sms
from uniep.group import Group
from uniep.layer import moe
from uniep.layer_stats import name_layer
from uniep.megatron import beside
from uniep.megatron.flags import activation_of
from uniep.megatron.grouped import plain_weight
from uniep.megatron.parts import Parts
from uniep.megatron.routing import capacity_of_factor, expert_biases, expert_weights


class Experts(torch.nn.Module):
    """Calls moe() with the parameters of Megatron's experts.

    The parameters are registered here once more, so that what Megatron hangs on a module's forward happens, as waiting
    for gathered parameters; the experts' own forward is never called. State dicts have them once, by Megatron's names.

    Args:
        config: TransformerConfig.
        ep_group: the expert-parallel process group.
        experts: Megatron's SequentialMLP or TEGroupedMLP.
        schedule: of moe(); an attribute too, to be changed between steps.
        save: of moe(); an attribute too, to be changed between steps.
        reserve_sms: of the Group; "auto" is what collectives beside the layer can take.
        collection: the ProcessGroupCollection that the layer was built with; None: parallel_state's groups.

    Attributes:
        main_grad: of moe(): "param" with gradient_accumulation_fusion, else None. Where DDP's main_grad is not fp32,
            calls run with None, and DDP adds the bf16 gradients itself.
    """

    def __init__(
        self,
        config: typing.Any,
        ep_group: dist.ProcessGroup,
        experts: torch.nn.Module,
        schedule: str | tuple[str, str] = "auto",
        save: str = "keep",
        reserve_sms: int | str = "auto",
        collection: typing.Any = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ep_group, self.topk = ep_group, config.moe_router_topk
        self.reserve_sms = reserved_sms.checked(reserve_sms)
        self.main_grad = "param" if config.gradient_accumulation_fusion else None
        self.capacity_factor: float | None = getattr(config, "moe_expert_rank_capacity_factor", None)
        self.schedule, self.save = schedule, save
        self.activation = typing.cast(str, activation_of(config))
        self.router_weight = "input" if getattr(config, "moe_apply_probs_on_input", False) else "activation"
        self.has_biases = bool(config.add_bias_linear)
        if self.has_biases:
            self.router_weight = "output"  # it multiplies FC2's bias, too
        self.collection = collection
        self.told: Group | None = None  # of the groups beside it
        self._experts = (experts,)  # a tuple, so that it is not registered
        self._tie()
        self.parts = Parts(experts, self._parameters)

    def _tie(self) -> None:
        """Registers the parameters of Megatron's experts as they are now."""
        experts = self._experts[0]
        layer = getattr(self._parameters.get("w2_0"), "uniep_layer", None)
        first, second = expert_weights(experts)
        self.single = first[0].dim() == 3
        self.count = len(first[0]) if self.single else len(first)
        self.keys = {name: [f"{name}_{expert}" for expert in range(self.count)] for name in ("w1", "w2", "b1", "b2")}
        for expert, (w1, w2) in enumerate(zip(first, second, strict=True)):
            self.register_parameter(f"w1_{expert}", w1)
            self.register_parameter(f"w2_{expert}", w2)
        if self.has_biases:
            for expert, (b1, b2) in enumerate(zip(*expert_biases(experts), strict=True)):
                self.register_parameter(f"b1_{expert}", b1)
                self.register_parameter(f"b2_{expert}", b2)
        if layer is not None:
            name_layer(second[0], layer)

    def _tie_anew(self) -> None:
        self._tie()
        self.parts.take_parameters()

    def forward(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, H] bf16, probs [T, E], routing_map [T, E] bool to [T, H] bf16."""
        self.parts.check()
        if getattr(self.config, "moe_pad_expert_input_to_capacity", False):
            routing_map = routing_map & (probs != 0)  # the padding: tokens that did not choose the expert
        main_grad = self.main_grad if self._has_fp32_sums() else None
        group = self._group(hidden_states.device)
        return moe(
            hidden_states,
            routing_map,
            probs.float(),
            self._weights("w1", main_grad),
            self._weights("w2", main_grad),
            b1=self._biases("b1"),
            b2=self._biases("b2"),
            topk=self.topk,
            group=group,
            schedule=self.schedule,
            capacity=capacity_of_factor(self.capacity_factor, len(hidden_states), self.topk, self.count),
            main_grad=typing.cast(typing.Any, main_grad),
            save=self.save,
            activation=self.activation,
            router_weight=self.router_weight,
        )

    def _group(self, device: torch.device) -> Group:
        group = Group(self.ep_group, device=device, reserve_sms=self.reserve_sms)
        if group is not self.told:
            beside.tell(group, self.config, self.collection)
            self.told = group
        return group

    def _has_fp32_sums(self) -> bool:
        """False where DDP sums in the parameters' type. Megatron-FSDP's sums are not known before backward."""
        summed = [self._first_trained(name) for name in self.keys if f"{name}_0" in self._parameters]
        sums = (getattr(one, "main_grad", None) for one in summed if not hasattr(one, "get_main_grad"))
        return all(one is None or one.dtype is torch.float32 for one in sums)

    def _first_trained(self, name: str) -> torch.nn.Parameter | None:
        """Frozen experts may lie beside others, and have no sums."""
        parameters = (self._parameters.get(key) for key in self.keys[name])
        return next((one for one in parameters if one is not None and one.requires_grad), None)

    def _weights(self, name: str, main_grad: str | None) -> torch.Tensor | list[torch.Tensor]:
        if self.single:
            return plain_weight(getattr(self, f"{name}_0"), name, main_grad is not None)
        return self._tensors(name)

    def _biases(self, name: str) -> list[torch.Tensor] | None:
        return self._tensors(name) if self.has_biases else None

    def _tensors(self, name: str) -> list[torch.Tensor]:
        parameters = self._parameters  # getattr() takes 0.5 us an expert and call
        return typing.cast(list[torch.Tensor], [parameters[key] for key in self.keys[name]])

    def _save_to_state_dict(self, *_: typing.Any) -> None:
        pass

    def _load_from_state_dict(self, *_: typing.Any) -> None:
        self._tie_anew()  # load_state_dict(assign=True) has replaced parameters by now

    def _apply(self, *_: typing.Any, **__: typing.Any) -> typing.Any:
        self._tie_anew()  # to_empty() and the like have
        return self

    def sharded_state_dict(self, *_: typing.Any, **__: typing.Any) -> dict[str, typing.Any]:
        return {}
