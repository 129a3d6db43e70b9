"""A small GPT trained by Megatron-core, its MoE layers Megatron's or UniEP's, under any of Megatron's parallelisms.

Attention and norms are stand-ins, since Megatron's own need Transformer Engine for context and sequence parallelism.
Everything else is Megatron's: layers, schedules of pipelines, DDP, optimizers.
"""

import contextlib
import dataclasses
import gc
import time

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: F401
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

import uniep.megatron
from uniep.pilot.stand_ins import Attention, Norm

VERSION = megatron.core.__version__


@dataclasses.dataclass(frozen=True)
class Setting:
    """Parallelism and sizes of a run; `changes` are fields of TransformerConfig."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    context: int = 1
    expert: int = 1
    layers: int = 2
    hidden: int = 64
    intermediate: int = 32
    experts: int = 8
    topk: int = 2
    heads: int = 4
    vocabulary: int = 128
    sequence: int = 32
    micro_batch: int = 2
    micro_batches: int = 1
    distributed_optimizer: bool = False
    deterministic: bool = False
    seed: int = 1234
    learning_rate: float = 3e-3
    nudged: int = 0  # not 0: half of the experts' weights have another last bit, which half this number says
    main_grad: bool = True  # what gradient_accumulation_fusion does; Megatron's own layers need a CUDA extension for it
    sums_in_fp32: bool = True  # DDP's main_grad; else in the parameters' type
    frozen: tuple[int, ...] = ()  # experts of each rank
    changes: dict = dataclasses.field(default_factory=dict)


def make_config(setting, **changes):
    given = {
        "num_layers": setting.layers,
        "hidden_size": setting.hidden,
        "num_attention_heads": setting.heads,
        "num_moe_experts": setting.experts,
        "moe_ffn_hidden_size": setting.intermediate,
        "moe_router_topk": setting.topk,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "tensor_model_parallel_size": setting.tensor,
        "sequence_parallel": setting.tensor > 1,
        "pipeline_model_parallel_size": setting.pipeline,
        "virtual_pipeline_model_parallel_size": setting.virtual,
        "context_parallel_size": setting.context,
        "expert_model_parallel_size": setting.expert,
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": torch.bfloat16,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "init_method_std": 0.02,
        "deallocate_pipeline_outputs": setting.pipeline > 1,
        "batch_p2p_comm": True,
        "deterministic_mode": setting.deterministic,
    }
    return TransformerConfig(**{**given, **setting.changes, **changes})


def block_spec(config, ours, stage=None):
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        layer.submodules.self_attention.submodules.core_attention = Attention
    return uniep.megatron.enable(spec) if ours and spec.layer_specs else spec


@contextlib.contextmanager
def parallelism(setting):
    """Megatron's process groups and random states; groups that were there before are ended."""
    end_groups()
    parallel_state.initialize_model_parallel(
        setting.tensor,
        setting.pipeline,
        setting.virtual,
        context_parallel_size=setting.context,
        expert_model_parallel_size=setting.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=3,
    )
    torch.use_deterministic_algorithms(setting.deterministic, warn_only=torch.cuda.is_available())
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(123)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        gc.collect()
        end_groups()


def end_groups():
    """Ends UniEP's groups and Megatron's: communicators that pile up take memory of the GPU."""
    for group in uniep.groups():
        group.close()
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in dict.fromkeys(groups):
        if group is not dist.group.WORLD and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def build_chunks(setting, ours, config):
    """The parts of the model that this rank holds: one, or one for each virtual stage."""
    chunks = []
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    stages = setting.virtual or 1
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    for stage in range(stages):
        given = {"vp_stage": stage} if setting.virtual else {}
        torch.manual_seed(setting.seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + stage)
        model = GPTModel(
            config,
            block_spec(config, ours, given.get("vp_stage")),
            vocab_size=setting.vocabulary,
            max_sequence_length=setting.sequence,
            pre_process=first(ignore_virtual=not setting.virtual, **given),
            post_process=last(ignore_virtual=not setting.virtual, **given),
            position_embedding_type="learned_absolute",
            **given,
        )
        chunks.append(model.bfloat16().to(device))
    if setting.nudged:
        for chunk in chunks:
            nudge(chunk, setting.nudged)
    if setting.main_grad:
        for module in moe_experts(chunks):
            module.main_grad = "param"
    for module in (module for chunk in chunks for module in chunk.modules() if hasattr(module, "local_experts")):
        for expert in setting.frozen:
            module.local_experts[expert].requires_grad_(False)
    return chunks


def nudge(model, seed):
    """Changes half of the experts' weights in their last bit, alike on all ranks: so replicas stay equal."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if ".local_experts." in name:
            bits = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int16)
            weight.data.view(torch.int16).bitwise_xor_(bits.to(weight.device))


def moe_experts(chunks):
    kind = uniep.megatron.Experts
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)]


def ddp_config(setting):
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=setting.sums_in_fp32,
        overlap_grad_reduce=True,
        use_distributed_optimizer=setting.distributed_optimizer,
        overlap_param_gather=setting.distributed_optimizer,
        bucket_size=20000 if setting.hidden < 256 else None,
    )


def batches(setting, device):
    """Endless: the micro-batches of this rank, the same in every step; ranks that split a sequence have their part."""
    replica = parallel_state.get_data_parallel_rank()
    part = parallel_state.get_context_parallel_rank()
    length = setting.sequence // setting.context
    generator = torch.Generator().manual_seed(7 + replica)
    shape = setting.micro_batches, setting.micro_batch, setting.sequence + 1
    text = torch.randint(0, setting.vocabulary, shape, generator=generator).to(device)
    columns = slice(part * length, (part + 1) * length)
    positions = torch.arange(setting.sequence, device=device)[columns].expand(setting.micro_batch, -1)
    while True:
        for one in text:
            yield one[:, :-1][:, columns].contiguous(), one[:, 1:][:, columns].contiguous(), positions


def forward_step(iterator, model):
    tokens, labels, positions = next(iterator)

    def loss_of(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, positions, None, labels=labels), loss_of


class Training:
    """Model, DDP and optimizer of one setting; within parallelism(setting)."""

    def __init__(self, setting, ours, wrap=None):
        self.setting = setting
        self.config = make_config(setting)
        chunks = build_chunks(setting, ours, self.config)
        self.device = next(chunks[0].parameters()).device
        make = wrap or (lambda config, chunk, index: DistributedDataParallel(
            self.config, ddp_config(setting), chunk, disable_bucketing=index > 0
        ))  # fmt: skip
        self.chunks = [make(self.config, chunk, index) for index, chunk in enumerate(chunks)]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=setting.learning_rate,
                weight_decay=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                clip_grad=1.0,
                use_distributed_optimizer=setting.distributed_optimizer,
                overlap_param_gather=setting.distributed_optimizer,
            ),
            self.chunks,
        )
        single = len(self.chunks) == 1
        self.config.no_sync_func = self.chunks[0].no_sync if single else [chunk.no_sync for chunk in self.chunks]
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.iterators = [batches(setting, self.device) for _ in self.chunks]

    def transport(self):
        """How the rows of the first of UniEP's layers travel."""
        group = uniep.Group(moe_experts(self.chunks)[0].ep_group, device=self.device)
        return f"{group.transport}: {group.why}"

    def step(self):
        """One step; the mean loss of all ranks."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self.iterators if len(self.iterators) > 1 else self.iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.setting.micro_batches,
            seq_length=self.setting.sequence,
            micro_batch_size=self.setting.micro_batch,
            forward_only=False,
        )
        worked, self.gradient_norm, _ = self.optimizer.step()
        assert worked
        total = torch.zeros(2, device=self.device)
        for one in losses:
            total += torch.stack([one["loss"].float(), torch.ones_like(one["loss"])])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def train(setting, ours, steps):
    """Losses by step, of all ranks, and seconds of a step after the first ones."""
    with parallelism(setting):
        training = Training(setting, ours)
        losses, times = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(training.step())
            times.append(time.perf_counter() - begin)
        times.sort()
        del training
    return losses, times[len(times) // 2]
