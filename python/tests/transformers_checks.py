"""What test_transformers.py starts: a tiny Qwen3-MoE made from a configuration, on 1 and 2 ranks."""

import sys

import torch
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN

import uniep
import uniep.transformers
from distributed_checks import disabled, expect_error, run_checks
from layers import relative_error, same_bits
from test_activations import MODELS
from uniep.numerics import read_numerics

EXPERTS = 8


def tiny(implementation: str, **changes) -> Qwen3MoeForCausalLM:
    """The same model each time."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        **(sizes | heads | {"num_experts": EXPERTS, "num_experts_per_tok": 3, "norm_topk_prob": True} | changes),
        initializer_range=0.1,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    assert model.config._experts_implementation == implementation
    return model


def batch(rank: int) -> torch.Tensor:
    return torch.randint(1, 96, (2, 24 + 8 * rank), generator=torch.Generator().manual_seed(5 + rank))


def step(model: Qwen3MoeForCausalLM, rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    tokens = batch(rank)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def check_loss_and_gradients_beside_eager(rank: int, ranks: int) -> None:
    exact = tiny("eager").double()
    expected_loss, expected = step(exact, rank)
    (eager_loss, eager), (loss, found) = (step(tiny(name), rank) for name in ("eager", "uniep"))
    assert abs(loss - expected_loss) < 0.01 * expected_loss
    assert abs(loss - eager_loss) < 0.01 * eager_loss
    for name, want in expected.items():
        own, theirs = (relative_error(gradients[name], want) for gradients in (found, eager))
        assert own <= 1.25 * theirs + 0.01, (name, own, theirs)


def check_activations_and_the_weight_behind_w2(rank: int, ranks: int) -> None:
    for act in ("gelu", "gelu_pytorch_tanh"):
        want = step(tiny("eager", hidden_act=act).double(), rank)[1]
        for options in ({}, {"router_weight": "output"}):
            model = tiny("eager", hidden_act=act)
            uniep.transformers.shard_experts(model, uniep.Group("self"), **options)
            found, eager = step(model, rank)[1], step(tiny("eager", hidden_act=act), rank)[1]
            for name, one in want.items():
                own, theirs = (relative_error(gradients[name], one) for gradients in (found, eager))
                assert own <= 1.25 * theirs + 0.01, (act, options, name, own, theirs)


def check_gates_that_are_served(rank: int, ranks: int) -> None:
    """moe()'s activation of experts with a gate of their own, or none: what it computes is in test_activations.py."""
    for name, (make, text) in MODELS.items():
        served = uniep.transformers.activation_of(make())
        assert served is not None and read_numerics(served, "output") == read_numerics(text, "output"), name


def tiny_oss(implementation: str, topk: int = 3) -> GptOssForCausalLM:
    """gpt-oss: transposed and interleaved weights, and biases. The same model each time."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": EXPERTS}
    config = GptOssConfig(**sizes, **counts, num_experts_per_tok=topk, initializer_range=0.1)
    torch.manual_seed(2)
    model = GptOssForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name.endswith("proj_bias"):
                one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) / 4)
    return model


def check_gpt_oss_beside_eager(rank: int, ranks: int) -> None:
    """All experts take every token: where two are as likely as bf16 rounds, each run would choose its own."""
    want_loss, want = step(tiny_oss("eager", EXPERTS).double(), rank)
    (_, eager), (loss, found) = (step(tiny_oss(name, EXPERTS), rank) for name in ("eager", "uniep"))
    assert abs(loss - want_loss) < 0.01 * want_loss
    assert sum(name.endswith("_proj_bias") for name in found) == 4
    for name, one in want.items():
        own, theirs = (relative_error(gradients[name], one) for gradients in (found, eager))
        assert own <= 1.25 * theirs + 0.01, (name, own, theirs)


def check_experts_of_another_class_by_name(rank: int, ranks: int) -> None:
    """As FSDP2 and parametrizations make them, of the experts' own."""
    tokens, losses = batch(rank), []
    for implementation in ("eager", "uniep"):
        model = tiny_oss(implementation)
        for layer in model.model.layers:
            own = type(layer.mlp.experts)
            layer.mlp.experts.__class__ = type(f"FSDP{own.__name__}", (own,), {})
        losses.append(model(tokens, labels=tokens).loss)
    assert abs(losses[0] - losses[1]) < 2e-3, losses


def check_sharded_gpt_oss_has_the_bits_of_whole_experts(rank: int, ranks: int) -> None:
    whole, sharded = tiny_oss("uniep"), tiny_oss("eager")
    before = {name: one.clone() for name, one in sharded.state_dict().items()}
    group = uniep.Group()
    experts = sharded.model.layers[0].mlp.experts
    for wrong, text in (
        ({"router_weight": "activation"}, "router_weight: 'activation'; must be 'output' or left out"),
        ({"main_grad": "param"}, "main_grad: 'param'; must be None"),
        ({"sav": "keep"}, "options: sav; legal are capacity, main_grad, router_weight, save, schedule"),
    ):
        expect_error(ValueError, text, lambda: uniep.transformers.shard_experts(sharded, group, **wrong))  # noqa: B023
    assert uniep.transformers.shard_experts(sharded, group) == 2
    assert experts.down_proj_bias.shape == (EXPERTS // ranks, 64)
    (loss, own), (whole_loss, theirs) = step(sharded, rank), step(whole, rank)
    assert loss == whole_loss
    for name, gradient in own.items():
        if "_proj" not in name or ".experts." not in name:
            assert same_bits(gradient, theirs[name]), name
    uniep.transformers.gather_experts(sharded)
    after = sharded.state_dict()
    assert all(same_bits(after[name], one) for name, one in before.items())


def check_uniep_disable_is_eager(rank: int, ranks: int) -> None:
    expected_loss, expected = step(tiny("eager"), rank)
    with disabled():
        loss, found = step(tiny("uniep"), rank)
        text = f"UNIEP_DISABLE: 1; Transformers has no layer of its own for experts on {ranks} ranks"
        shard = lambda: uniep.transformers.shard_experts(tiny("uniep"), uniep.Group())  # noqa: E731
        if ranks > 1:
            expect_error(ValueError, text, shard)
        else:
            assert shard() == 2
    assert loss == expected_loss
    assert all(same_bits(found[name], one) for name, one in expected.items())


def check_training(rank: int, ranks: int) -> None:
    """Twenty steps on one text, in fp32 under autocast: the losses of eager and UniEP stay together."""
    losses: dict[str, list[float]] = {}
    for implementation in ("eager", "uniep"):
        model = tiny(implementation).float()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        losses[implementation] = []
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(0), labels=batch(0)).loss
            loss.backward()
            optimizer.step()
            losses[implementation].append(loss.item())
        assert model.model.layers[0].mlp.experts.down_proj.grad.dtype == torch.float32
    assert losses["uniep"][-1] < 0.3 * losses["uniep"][0]
    for eager, own in zip(losses["eager"], losses["uniep"], strict=True):
        assert abs(own - eager) < 0.02 * eager, losses


def generate(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, synced: bool = False):
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        synced_gpus=synced,
    )


def check_generation_beside_eager(rank: int, ranks: int) -> None:
    """The same tokens, up to where eager's best two are as near as bf16 rounds."""
    tokens = batch(0)[:, :10]
    eager, own = (generate(tiny(name), tokens) for name in ("eager", "uniep"))
    for row in range(len(tokens)):
        for position in range(12):
            logits, ours = eager.logits[position][row].float(), own.logits[position][row].float()
            assert (logits - ours).abs().max() < 0.05 * logits.abs().max()
            if eager.sequences[row, 10 + position] != own.sequences[row, 10 + position]:
                best = logits.topk(2).values
                assert best[0] - best[1] < 0.05 * logits.abs().max()
                break


def check_sharded_experts_have_the_bits_of_whole_ones(rank: int, ranks: int) -> None:
    whole, sharded = tiny("uniep"), tiny("eager")
    group = uniep.Group()
    assert uniep.transformers.shard_experts(sharded, group) == 2
    experts, local = sharded.model.layers[0].mlp.experts, EXPERTS // ranks
    assert experts.config._experts_implementation == "uniep"
    assert experts.gate_up_proj.shape == (local, 64, 64)
    assert list(sharded.state_dict()) == list(whole.state_dict())
    loss, gradients = step(sharded, rank)
    own_loss, own = step(whole, rank)
    assert loss == own_loss
    for name, gradient in gradients.items():
        if ".experts." not in name:
            assert same_bits(gradient, own[name]), name
    # Weight gradients are sums over all ranks' tokens, so one rank's are compared where the others have the same.
    for other in (whole, sharded):
        other.zero_grad()
    twice = dict(step(whole, 0)[1])
    for name, gradient in step(sharded, 0)[1].items():
        if ".experts." in name:
            part = twice[name].chunk(ranks)[rank].double() * ranks
            assert relative_error(gradient, part) < 0.01, name


def check_sharded_generation(rank: int, ranks: int) -> None:
    sharded, whole = tiny("eager"), tiny("uniep")
    uniep.transformers.shard_experts(sharded, uniep.Group())
    tokens = batch(rank)[:, :10]
    assert torch.equal(generate(sharded, tokens, synced=ranks > 1).sequences, generate(whole, tokens).sequences)


def check_one_graph_has_the_loss_of_eager(rank: int, ranks: int) -> None:
    """torch.compile(fullgraph=True), with whole experts and with sharded ones."""
    for shards in (False, True):
        results = []
        for compiles in (False, True):
            model = tiny("uniep")
            if shards:
                uniep.transformers.shard_experts(model, uniep.Group())
            called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
            tokens = batch(rank)
            loss = called(tokens, labels=tokens).loss
            loss.backward()
            results.append([loss.detach(), *(one.grad for one in model.parameters())])
        assert all(same_bits(*pair) for pair in zip(*results, strict=True)), shards
    torch._dynamo.reset()


def check_sharding_leaves_other_models_alone(rank: int, ranks: int) -> None:
    """Models that were made of one configuration have it in common."""
    other = tiny("eager")
    sharded = Qwen3MoeForCausalLM(other.config).bfloat16()
    expected = step(other, rank)[0]
    uniep.transformers.shard_experts(sharded, uniep.Group())
    mine, theirs = (one.model.layers[0].mlp.experts for one in (sharded, other))
    assert sharded.config is other.config and theirs.config is other.config
    assert mine.config is not other.config and mine.config._experts_implementation == "uniep"
    assert other.config._experts_implementation == "eager" and step(other, rank)[0] == expected
    sharded.set_experts_implementation("grouped_mm")  # sharded experts run in UniEP alone
    assert mine.config._experts_implementation == "uniep" and step(sharded, rank)
    uniep.transformers.gather_experts(sharded)
    assert mine.config is other.config and mine.config._experts_implementation == "grouped_mm"


def check_gathering(rank: int, ranks: int) -> None:
    model, before = tiny("uniep"), tiny("uniep").state_dict()
    expect_error(ValueError, "its experts are not sharded", lambda: uniep.transformers.gather_experts(model))
    uniep.transformers.shard_experts(model, uniep.Group())
    text = "its experts are sharded already"
    expect_error(ValueError, text, lambda: uniep.transformers.shard_experts(model, uniep.Group()))
    uniep.transformers.gather_experts(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(same_bits(after[name], before[name]) for name in before)
    assert step(model, rank)[0] == step(tiny("uniep"), rank)[0]
    eager = tiny("eager")
    uniep.transformers.shard_experts(eager, uniep.Group(), capacity=(128 * EXPERTS, 1), main_grad="param")
    uniep.transformers.gather_experts(eager)
    assert eager.config._experts_implementation == "eager"
    eager.set_experts_implementation("uniep")
    assert step(eager, rank)[0] == step(tiny("uniep"), rank)[0]  # without the options


def check_what_layers_share_stays_shared(rank: int, ranks: int) -> None:
    def tied() -> tuple[Qwen3MoeForCausalLM, list[torch.nn.Module]]:
        model = tiny("uniep")
        first, second = (layer.mlp.experts for layer in model.model.layers)
        second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
        return model, [first, second]

    def assert_tied(first: torch.nn.Module, second: torch.nn.Module, size: int) -> None:
        for name in ("gate_up_proj", "down_proj"):
            assert getattr(first, name) is getattr(second, name) and len(getattr(first, name)) == size

    model, experts = tied()
    group = uniep.Group()
    uniep.transformers.shard_experts(model, group)
    assert_tied(*experts, EXPERTS // ranks)
    loss, gradients = step(model, 0)
    whole_loss, whole = step(tied()[0], 0)
    assert loss == whole_loss and gradients.keys() == whole.keys()
    uniep.transformers.gather_experts(model)
    assert_tied(*experts, EXPERTS)
    assert step(model, 0)[0] == whole_loss


def check_options(rank: int, ranks: int) -> None:
    expected = step(tiny("uniep"), 0)[1]
    model = tiny("uniep")
    uniep.transformers.shard_experts(model, uniep.Group("self"), save="recompute", schedule="fusion=none")
    found = step(model, 0)[1]
    assert all(same_bits(found[name], expected[name]) for name in expected)


def check_refusals(rank: int, ranks: int) -> None:
    model = tiny("uniep", hidden_act="relu")
    text = "Qwen3MoeExperts.act_fn: ReLU; experts_implementation='uniep' serves silu(gate) * up"
    expect_error(ValueError, text, lambda: model(batch(0)))
    expect_error(ValueError, text, lambda: uniep.transformers.shard_experts(model, uniep.Group("self")))
    deepseek = MODELS["deepseek-v4"][0]()
    deepseek.act_fn = ACT2FN["gelu"]
    text = "DeepseekV4Experts.act_fn: GELUActivation; experts_implementation='uniep' serves silu(gate) * up"
    expect_error(ValueError, text, lambda: uniep.transformers.refuse(deepseek))
    normed = tiny("uniep")
    for layer in normed.model.layers:
        layer.mlp.experts.has_post_expert_norm = True
    text = "Qwen3MoeExperts.has_post_expert_norm: True; experts_implementation='uniep' serves False"
    expect_error(ValueError, text, lambda: normed(batch(0)))
    text = "gate_up_proj: torch.float32; load the model with dtype=torch.bfloat16"
    expect_error(ValueError, text, lambda: tiny("uniep").float()(batch(0)))
    dense = torch.nn.Linear(8, 8)
    text = "model: Linear has no experts"
    expect_error(ValueError, text, lambda: uniep.transformers.shard_experts(dense, uniep.Group("self")))
    if ranks > 1:
        odd = tiny("uniep", num_experts=5)
        text = f"group: {ranks} ranks; must divide the 5 experts of Qwen3MoeExperts"
        expect_error(ValueError, text, lambda: uniep.transformers.shard_experts(odd, uniep.Group()))


if __name__ == "__main__":
    sys.exit(run_checks(globals()))
