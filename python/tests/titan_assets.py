"""What torchtitan's debug configurations look for in the current folder."""

import json
import pathlib


def write_assets(folder: pathlib.Path) -> None:
    """A tokenizer of bytes and a text, where torchtitan's debug configurations look for them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {one: number for number, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("tokenizer", "c4_test"):
        (folder / "tests" / "assets" / name).mkdir(parents=True)
    tokenizer.save(str(folder / "tests/assets/tokenizer/tokenizer.json"))
    names = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tests/assets/tokenizer/tokenizer_config.json").write_text(names)
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()
    lines = [json.dumps({"text": paragraph}) for paragraph in text.split("\n\n")]
    (folder / "tests/assets/c4_test/data.jsonl").write_text("\n".join(lines))
