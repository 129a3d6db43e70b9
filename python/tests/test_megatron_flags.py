"""What the plugin for Megatron-core refuses: every message, and the table of docs/megatron.md."""

import dataclasses
import importlib.util
import pathlib
import re

import pytest
import torch

if importlib.util.find_spec("megatron") is None:  # test_megatron.py fails then where it has to be there
    pytest.skip("megatron-core is not installed", allow_module_level=True)

# Values that are refused, and fields that they need beside them.
WRONG = {
    "expert_tensor_parallel_size": [2],
    "expert_gtp_weight_remat_size": [2],
    "params_dtype": [torch.float16, torch.float32],
    "fp8": ["hybrid"],
    "fp4": ["e2m1"],
    "quant_recipe": ["a recipe"],
    "add_bias_linear": [True],  # beside moe_apply_probs_on_input
    "activation_func": [torch.tanh, torch.nn.functional.relu],
    "moe_mlp_glu_interleave_size": [32],
    "moe_paged_stash": [True],
    "overlap_moe_expert_parallel_comm": [True],
    "delay_wgrad_compute": [True],
    "init_model_with_meta_device": [True],
    "transformer_impl": ["inference_optimized"],
    "offload_modules": [["core_attn", "moe_act"], ["expert_fc1"], ["fused_group_mlp"]],
    "cuda_graph_impl": ["full_iteration"],
    "cuda_graph_modules": [["attn", "moe"], "moe", ([], "local"), ("full", "local")],
    "cuda_graph_scope": [["moe", "moe_router"], ([], "transformer_engine")],
}
SERVED = {
    "expert_tensor_parallel_size": [None, 1],
    "offload_modules": [None, ["core_attn"]],
    "cuda_graph_impl": ["none"],
    "cuda_graph_modules": [[], "full", (["attn"], "local"), ["moe_router", "moe_preprocess"], "attn,moe_router"],
    "cuda_graph_scope": [None, (None, "local"), (["attn", "moe_router"], "transformer_engine")],
    "transformer_impl": ["local", "transformer_engine"],
}


def config(name, value):
    """A configuration that is served, but for this field; a pair is its value and that of cuda_graph_impl."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    found = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_moe_experts=8,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    value, graphs = value if isinstance(value, tuple) else (value, None)
    if graphs is not None:
        found.cuda_graph_impl, found.cuda_graph_modules = graphs, ["attn"]
    setattr(found, name, value)
    if name == "add_bias_linear":
        found.moe_apply_probs_on_input = True
    found.fine_grained_activation_offloading = name == "offload_modules"
    return found, value


def fields():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {field.name for field in dataclasses.fields(TransformerConfig)}


def test_every_flag_is_refused_with_the_value_that_works():
    import uniep.megatron

    assert list(WRONG) == [flag.name for flag in uniep.megatron.FLAGS]
    for flag in uniep.megatron.FLAGS:
        for value in WRONG[flag.name] if flag.name in fields() else ():
            wrong, shown = config(flag.name, value)
            text = re.escape(f"{flag.name}: {shown!r}; UniEP's layer needs {flag.legal}")
            with pytest.raises(ValueError, match=f"^{text}$"):
                uniep.megatron.UniEPMoELayer(wrong)


def test_all_refused_flags_in_one_error():
    import uniep.megatron

    found, _ = config("fp8", "hybrid")
    found.delay_wgrad_compute = True
    lines = "fp8: 'hybrid'; UniEP's layer needs None\ndelay_wgrad_compute: True; UniEP's layer needs False"
    with pytest.raises(ValueError, match=f"^{re.escape(lines)}$"):
        uniep.megatron.refuse(found)


def test_values_that_are_served():
    import uniep.megatron

    for name, values in SERVED.items():
        for value in values if name in fields() else ():
            uniep.megatron.refuse(config(name, value)[0])
    unused = config("offload_modules", ["moe_act"])[0]
    unused.fine_grained_activation_offloading = False
    uniep.megatron.refuse(unused)


def test_what_uniep_hides_itself_is_turned_off(caplog):
    import uniep.megatron
    from uniep.megatron import flags

    for name in set(flags.NOT_NEEDED) & fields():
        found, _ = config(name, True)
        caplog.clear()
        flags._told.discard(name)
        for _ in range(2):
            setattr(found, name, True)
            flags.turn_off_not_needed(found)
            assert getattr(found, name) is False
        assert [one.getMessage().split(":")[0] for one in caplog.records] == [name]
        setattr(found, name, True)
        with pytest.raises(ValueError, match=f"^{name}: True; UniEPBackend needs False"):
            uniep.megatron.UniEPBackend(
                config=found, ep_group=None, routed_experts=None, shared_experts=None, num_local_experts=0
            )


def test_activations_as_moe_takes_them():
    from megatron.core.activations import quick_gelu, squared_relu

    from uniep.megatron.flags import activation_of

    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    found = config("activation_func", silu)[0]
    for function, gated, limit, offset, expected in (
        (silu, True, None, 0.0, "swiglu"),
        (quick_gelu, True, 7.0, 1.0, "swiglu:alpha=1.702,limit=7.0,up_offset=1.0"),
        (quick_gelu, True, None, 0.0, "swiglu:alpha=1.702,limit=0.0,up_offset=0.0"),
        (gelu, True, None, 0.0, "geglu_erf"),
        (squared_relu, False, None, 0.0, "relu2"),
        (silu, False, None, 0.0, "silu"),
        (silu, True, 7.0, 0.5, "swiglu:alpha=1,limit=7.0,up_offset=0.5"),
        (gelu, True, None, 1.0, None),
        (gelu, False, None, 0.0, None),
        (squared_relu, True, None, 0.0, None),
    ):
        found.activation_func, found.gated_linear_unit = function, gated
        found.activation_func_clamp_value, found.glu_linear_offset = limit, offset
        assert activation_of(found) == expected


def test_activations_of_fused_functions():
    """Those of Megatron and of Transformer Engine leave clamp and offset of silu out, and gelu is another one."""
    from uniep.megatron.flags import activation_of

    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    for flag, function, gated, expected in (
        ("bias_activation_fusion", silu, True, "swiglu"),
        ("use_te_activation_func", silu, True, "swiglu"),
        ("use_te_activation_func", gelu, True, "geglu_tanh"),
        ("use_te_activation_func", silu, False, None),
        ("use_transformer_engine_op_fuser", silu, True, None),
    ):
        found = config("activation_func", function)[0]
        found.gated_linear_unit, found.activation_func_clamp_value = gated, 7.0
        found.bias_activation_fusion = False
        if flag in fields():
            setattr(found, flag, True)
            assert activation_of(found) == expected


def test_the_newest_version_has_every_field():
    """A field that Megatron renames is not refused any more, and nobody would see it."""
    import megatron.core

    import uniep.megatron

    if tuple(map(int, megatron.core.__version__.split(".")[:2])) < (0, 19):
        pytest.skip("some fields came with 0.19")
    names = [flag.name for flag in uniep.megatron.FLAGS] + list(uniep.megatron.flags.NOT_NEEDED)
    assert not [name for name in names if name not in fields()]


def test_the_table_of_the_documentation():
    import uniep.megatron

    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "megatron.md").read_text()
    section = text.split("## What is refused")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)
    assert rows == [(flag.name, flag.legal) for flag in uniep.megatron.FLAGS]
