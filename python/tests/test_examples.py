"""The programs of examples/python, as their first lines say."""

import pathlib
import re
import subprocess
import sys

from ranks import run_ranks

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


def test_train_moe_compares():
    text = run_ranks(2, EXAMPLES / "train_moe.py", "--compare", "--steps", "40")
    assert "2 ranks on cpu, transport torch" in text
    apart = float(re.search(r"losses at most ([\d.]+) % apart", text)[1])
    assert 0 < apart < 1.0, text  # 0 would be the same layer twice
    for kind in ("torch", "uniep"):
        losses = [float(loss) for loss in re.findall(rf"{kind} +step +\d+  loss ([\d.]+)", text)]
        assert len(losses) == 5 and losses[-1] < 0.6 * losses[0], text


def test_train_moe_alone():
    program = [sys.executable, str(EXAMPLES / "train_moe.py"), "--layer", "uniep", "--steps", "2"]
    text = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert "1 ranks on cpu, transport native" in text
    assert len(re.findall(r"^uniep +step", text, re.MULTILINE)) == 2


def test_own_gemm():
    text = run_ranks(2, EXAMPLES / "own_gemm.py")
    apart = [float(number) for number in re.findall(r"([\d.]+) apart", text)]
    assert len(apart) == 5 * 2 and max(apart) < 0.01, text
