"""The models that the pilot trains."""

from __future__ import annotations

import dataclasses
import typing


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model. `changes` are further fields of Megatron's configuration."""

    layers: int
    hidden: int
    intermediate: int  # of an expert
    experts: int
    topk: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int  # sequences of a rank and step
    learning_rate: float
    dense_layers: int = 0  # the first ones, without experts
    latent_attention: bool = False
    changes: dict[str, typing.Any] = dataclasses.field(default_factory=dict)


SIZES = {
    "tiny": Size(
        layers=2,
        hidden=64,
        intermediate=32,
        experts=8,
        topk=2,
        heads=4,
        vocabulary=256,
        sequence=64,
        batch=4,
        learning_rate=3e-3,
    ),
    "qwen3-30b": Size(
        layers=48,
        hidden=2048,
        intermediate=768,
        experts=128,
        topk=8,
        heads=32,
        vocabulary=151936,
        sequence=4096,
        batch=1,
        learning_rate=1e-4,
        changes={"num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True, "ffn_hidden_size": 6144},
    ),
    "deepseek-v2-lite": Size(
        layers=27,
        hidden=2048,
        intermediate=1408,
        experts=64,
        topk=6,
        heads=16,
        vocabulary=102400,
        sequence=4096,
        batch=1,
        learning_rate=1e-4,
        dense_layers=1,
        latent_attention=True,
        changes={
            "ffn_hidden_size": 10944,
            "moe_shared_expert_intermediate_size": 2816,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "kv_channels": 128,
            "rope_type": "rope",
        },
    ),
}


def of_model(name: str, layers: int | None, option: str = "--layers") -> Size:
    """The sizes of a model, with fewer layers where that is asked for.

    Raises:
        ValueError: there is no such model, or it has not so many layers.
    """
    if name not in SIZES:
        raise ValueError(f"--model: {name}; legal are {', '.join(SIZES)}")
    size = SIZES[name]
    if layers is None:
        return size
    least = size.dense_layers + 1
    if not least <= layers <= size.layers:
        raise ValueError(f"{option}: {layers}; {name} has {size.layers}, and at least {least} are needed")
    return dataclasses.replace(size, layers=layers)
