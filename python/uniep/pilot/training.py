"""A GPT of Megatron-core's, trained with one arm's MoE layers: everything but these is equal in all arms."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import hashlib
import json
import math
import pathlib
import tempfile
import typing
from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.config import set_experimental_flag
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

import uniep.megatron
from uniep.pilot import graphs
from uniep.pilot.arms import STEPS_BEFORE_GRAPHS, Arm, has_transformer_engine
from uniep.pilot.fingerprint import fingerprint
from uniep.pilot.sizes import Size
from uniep.pilot.stand_ins import Attention, Norm
from uniep.pilot.text import Text
from uniep.pilot.world import communicators, high_priority_groups, set_deterministic


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all arms share."""

    size: Size
    text: Text
    device: torch.device
    seed: int
    deterministic: bool = False
    cuda_graphs: bool = False  # graphs.py
    used_bytes: int = 0  # of the GPU's memory before any arm


def make_config(setting: Setting, arm: Arm, ranks: int) -> typing.Any:
    """Megatron's configuration of a model and an arm."""
    size = setting.size
    given = {
        "num_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_moe_experts": size.experts,
        "moe_ffn_hidden_size": size.intermediate,
        "moe_router_topk": size.topk,
        "moe_layer_freq": [int(layer >= size.dense_layers) for layer in range(size.layers)],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "expert_model_parallel_size": ranks,
        "expert_tensor_parallel_size": 1,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "bias_activation_fusion": torch.cuda.is_available(),
        "bias_dropout_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,  # of the output layer, which has it through Apex alone
        "init_method_std": 0.02,
        "deterministic_mode": setting.deterministic,
        **(graphs.changes() if setting.cuda_graphs else {}),
        **size.changes,
        **arm.changes,
    }
    kind = MLATransformerConfig if size.latent_attention else TransformerConfig
    if _may_overlap_shared_experts(setting, arm):
        try:
            return kind(**given, moe_shared_expert_overlap=True)
        except ValueError as error:  # with the flex dispatcher before 0.18
            if "moe_shared_expert_overlap" not in str(error):
                raise
    return kind(**given)


def _may_overlap_shared_experts(setting: Setting, arm: Arm) -> bool:
    """UniEP hides dispatch and combine otherwise; and CUDA graphs have the shared experts inside only without."""
    has_them = "moe_shared_expert_intermediate_size" in setting.size.changes
    return has_them and arm.schedule is None and not setting.cuda_graphs


def what_it_is(setting: Setting, arm: Arm, ranks: int) -> str:
    """An arm with this model, in words."""
    overlaps = make_config(setting, arm, ranks).moe_shared_expert_overlap
    return f"{arm.what}, shared experts beside dispatch and combine" if overlaps else arm.what


def _block_spec(config: typing.Any, arm: Arm) -> typing.Any:
    with_engine = has_transformer_engine()
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_engine)
    if not with_engine:
        spec.layer_norm = Norm
        for layer in spec.layer_specs:
            parts = layer.submodules
            parts.input_layernorm = parts.pre_mlp_layernorm = Norm
            attention = parts.self_attention.submodules
            attention.core_attention = Attention
            for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
                if hasattr(attention, name) and config.qk_layernorm:
                    setattr(attention, name, Norm)
    if arm.schedule is None:
        return spec
    return uniep.megatron.enable(spec, schedule=arm.schedule, reserve_sms=arm.reserve_sms)


def set_up_parallelism(
    ranks: int, bounded: bool = True, timeout: datetime.timedelta = datetime.timedelta(minutes=30)
) -> None:
    """Megatron's process groups, for the whole run: expert parallelism over all ranks.

    Args:
        bounded: whether collectives beside layers leave UniEP's kernels their SMs, and go before other kernels.
    """
    told = communicators(bounded)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(told, file)
        file.flush()
        parallel_state.initialize_model_parallel(
            1,
            1,
            expert_model_parallel_size=ranks,
            expert_tensor_parallel_size=1,
            nccl_communicator_config_path=file.name if told else None,
            high_priority_stream_groups=high_priority_groups(bounded),
            distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
        )


class Training:
    """Model, DDP and distributed optimizer of one arm, with parameters drawn from the setting's seed.

    Attributes:
        step_number: how many steps its parameters have seen.
    """

    def __init__(self, setting: Setting, arm: Arm) -> None:
        self.setting, self.arm, self.step_number = setting, arm, 0
        self.graphs: typing.Any = None  # Megatron's, once they are captured
        ranks = dist.get_world_size()
        set_deterministic(setting.deterministic)
        set_experimental_flag(arm.experimental)
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        tensor_parallel.random.initialize_rng_tracker(use_te_rng_tracker=setting.cuda_graphs, force_reset=True)
        model_parallel_cuda_manual_seed(setting.seed)
        torch.manual_seed(setting.seed)
        self.config = make_config(setting, arm, ranks)
        model = GPTModel(
            self.config,
            _block_spec(self.config, arm),
            vocab_size=setting.size.vocabulary,
            max_sequence_length=setting.size.sequence,
            position_embedding_type="rope",
        )
        self.model = model.bfloat16().to(setting.device)
        for module in self.model.modules():
            if isinstance(module, uniep.megatron.Experts):
                module.main_grad = "param"
            if hasattr(module, "fuse_wgrad_accumulation"):  # Transformer Engine's
                module.fuse_wgrad_accumulation = True
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            bucket_size=20000 if setting.size.hidden < 256 else None,
        )
        # Graphs are captured on a stream of their own, which must not wait for the default one: so the gradients' nodes
        # are made on another stream, as Megatron's training loop does.
        aside = torch.cuda.current_stream()
        if setting.cuda_graphs:
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self.ddp = DistributedDataParallel(self.config, ddp, self.model)
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=setting.size.learning_rate,
                weight_decay=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                clip_grad=1.0,
                use_distributed_optimizer=True,
                overlap_param_gather=True,
            ),
            [self.ddp],
        )
        self.config.no_sync_func = self.ddp.no_sync
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def _batches(self) -> Iterator[tuple[torch.Tensor, ...]]:
        replica = parallel_state.get_data_parallel_rank()
        device = self.setting.device
        tokens, labels = (one.to(device) for one in self.setting.text.batch(self.step_number, replica))
        yield tokens, labels, torch.arange(tokens.shape[1], device=device).expand_as(tokens)

    def step(self) -> torch.Tensor:
        """One step; this rank's mean loss, on its device."""
        size = self.setting.size
        if self.setting.cuda_graphs and self.graphs is None and self.step_number >= STEPS_BEFORE_GRAPHS:
            self.graphs = graphs.capture(self.ddp, self.config, size, self.optimizer)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=self._batches(),
            model=self.ddp,
            num_microbatches=1,
            seq_length=size.sequence,
            micro_batch_size=size.batch,
            forward_only=False,
        )
        worked, _, _ = self.optimizer.step()
        if not worked:
            raise RuntimeError(f"arm {self.arm.name}, step {self.step_number}: the optimizer found no finite gradient")
        self.step_number += 1
        return typing.cast(torch.Tensor, losses[0]["loss"]).float()

    def run(self, steps: int) -> list[float]:
        """Steps without a look at the clock; the mean losses of all ranks."""
        return mean_of_ranks([self.step() for _ in range(steps)])

    def finish_parameters(self) -> None:
        """Waits for parameters that the optimizer still gathers."""
        self.ddp.disable_forward_pre_hook()
        self.ddp.enable_forward_pre_hook()

    def digest(self) -> str:
        """Hexadecimal digits that stand for the parameters of all ranks, by name. Collective."""
        self.finish_parameters()
        found = hashlib.sha256()
        parameters = dict(sorted(self.model.named_parameters()))
        numbers = torch.stack([fingerprint(one) for one in parameters.values()]).tolist()
        for name, number in zip(parameters, numbers, strict=True):
            found.update(f"{name} {number}\n".encode())
        parts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(parts, found.hexdigest())
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def _optimizers(self) -> list[typing.Any]:
        chained = getattr(self.optimizer, "chained_optimizers", None) or [self.optimizer]
        return [one.optimizer for one in chained]

    def save(self, folder: pathlib.Path) -> None:
        """This rank's part of model, optimizer and step, as a file of its own in the folder. Collective."""
        self.finish_parameters()
        folder.mkdir(parents=True, exist_ok=True)
        masters = [[one.data for group in opt.param_groups for one in group["params"]] for opt in self._optimizers()]
        content = {
            "step": self.step_number,
            "model": {name: one.data for name, one in self.model.named_parameters()},
            "masters": masters,
            "optimizers": [one.state_dict() for one in self._optimizers()],
        }
        torch.serialization.set_crc32_options(False)  # they take longer than all else
        torch.save(content, folder / f"rank{dist.get_rank()}.pt")
        dist.barrier()

    def load(self, folder: pathlib.Path) -> None:
        """What save() has left, of the same number of ranks. Collective."""
        if self.step_number == 0:
            self.step()  # without one the optimizer has no state to load into
        self.finish_parameters()
        file = folder / f"rank{dist.get_rank()}.pt"
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # Adam counts steps there
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(found["model"][name])
            for optimizer, masters, state in zip(
                self._optimizers(), found["masters"], found["optimizers"], strict=True
            ):
                own = [one for group in optimizer.param_groups for one in group["params"]]
                for parameter, master in zip(own, masters, strict=True):
                    parameter.copy_(master)
                optimizer.load_state_dict(state)
        self.step_number = found["step"]

    def _release(self) -> None:
        """Frees the memory itself: Megatron-core keeps what refers to a model, as rotary embeddings with hooks of DDP
        in a cache, for as long as the process lives."""
        held = [
            one
            for buffer in [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
            for one in (buffer.param_data, buffer.grad_data)
        ]
        for optimizer in self._optimizers():
            held += [value for state in optimizer.state.values() for value in state.values()]
            held += [one.data for group in optimizer.param_groups for one in group["params"]]
        held += [one.data for one in self.model.parameters()]
        for one in held:
            if isinstance(one, torch.Tensor) and one.untyped_storage().resizable():
                one.untyped_storage().resize_(0)

    def close(self) -> None:
        """Gives all memory back, and ends UniEP's groups."""
        if self.graphs is not None:
            self.graphs.delete_cuda_graphs()
            self.graphs = None
        for group in uniep.groups():
            group.close()
        self._release()
        _forget_moe_metrics()
        del self.model, self.ddp, self.optimizer, self.config
        set_deterministic(False)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _forget_moe_metrics() -> None:
    """Megatron keeps a number for each layer of the first model; the next may have more layers."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # before 0.18
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def _forward_step(iterator: Iterator[tuple[torch.Tensor, ...]], model: typing.Any) -> tuple[typing.Any, typing.Any]:
    tokens, labels, positions = next(iterator)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, positions, None, labels=labels), loss_of


def mean_of_ranks(values: list[torch.Tensor]) -> list[float]:
    """Scalars of this rank as means of all ranks. Collective."""
    total = torch.stack(values).double()
    dist.all_reduce(total)
    return [float(one) for one in (total / dist.get_world_size()).tolist()]
