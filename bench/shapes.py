"""Sizes of models' layers: hidden, intermediate, experts, top-k. One table for all programs here."""

SHAPES = {  # those of `--shape` of the program, src/cli/shapes.cpp
    "deepseek-v3": (7168, 2048, 256, 8),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
    "kimi-k2": (7168, 2048, 384, 8),
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-a22b": (4096, 1536, 128, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2),
    "moonlight-16b-a3b": (2048, 1408, 64, 6),
    "gpt-oss-120b": (2880, 2880, 128, 4),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "glm-4.5": (5120, 1536, 160, 8),
    "dsv3": (7168, 2048, 256, 8),
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
ONLY_HERE = {"nemotron-3-nano": (2688, 1856, 128, 6)}  # its experts have a formula of their own
FOUR = ("dsv3", "qwen3-235b", "qwen3-30b", "mixtral")  # what most tables have
EIGHT = 8  # ranks, of which a program on fewer gives each the share of one
