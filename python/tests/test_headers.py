"""The public headers: each can be included alone, and those for C have the names of C++."""

import pathlib
import re
import shutil
import subprocess

import pytest

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
C_HEADERS = sorted(path.name for path in (INCLUDE / "uniep").glob("c_*.h"))
CPP_HEADERS = sorted(path.name for path in (INCLUDE / "uniep").glob("*.h"))
STRICT = ["-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{INCLUDE}"]


def compile_alone(compiler: str, header: str, *options: str) -> None:
    compiles(compiler, f'#include "uniep/{header}"\n#include "uniep/{header}"\n', *options)


def compiles(compiler: str, source: str, *options: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    done = subprocess.run([compiler, *STRICT, *options, "-"], input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("standard", ["c99", "c11"])
@pytest.mark.parametrize("header", C_HEADERS)
def test_a_header_for_c_compiles_alone_as_c(header, standard):
    compile_alone("cc", header, "-x", "c", f"-std={standard}", "-Wstrict-prototypes")


@pytest.mark.parametrize("header", CPP_HEADERS)
def test_a_header_compiles_alone_as_cpp(header):
    compile_alone("c++", header, "-x", "c++", "-std=c++20")


def test_the_header_of_all_has_no_declaration_of_its_own():
    assert len(C_HEADERS) > 8
    text = re.sub(r"/\*.*?\*/", "", (INCLUDE / "uniep/c_api.h").read_text(), flags=re.DOTALL)
    assert set(text.split("\n")) - {"", "#pragma once"} == {
        f'#include "uniep/{name}"' for name in C_HEADERS if name != "c_api.h"
    }


def test_the_program_of_the_page_for_c_compiles():
    page = (INCLUDE.parent / "docs/c.md").read_text()
    (program,) = re.findall(r"```c\n(.*?)```", page, flags=re.DOTALL)
    include, calls = program.split("\n", 1)
    given = "uniep_group* group, int64_t tokens, const void *ids, const float* probs, const void *w1, const void *w2, "
    given += "void *dw1, void *dw2, const void *x, void *y, const void *dy, void *dx, float* dprobs"
    made = "uniep_placement* placement;\nuniep_saved* saved;\n"
    function = f"{include}\nvoid run({given});\nvoid run({given}) {{\n{made}{calls}}}\n"
    compiles("cc", function, "-x", "c", "-std=c99")


def fields(header: str, opening: str) -> list[str]:
    """Names of a structure's fields, in order."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (INCLUDE / "uniep" / header).read_text(), flags=re.DOTALL)
    match = re.search(re.escape(opening) + r" \{(.*?)\n\}", text, flags=re.DOTALL)
    assert match, opening
    return re.findall(r"(\w+)(?:\s*=[^;]*|\{\})?;", match.group(1))


@pytest.mark.parametrize(
    ("name", "c_name"),
    [
        ("Routing", "uniep_routing"),
        ("Weights", "uniep_weights"),
        ("WeightGradients", "uniep_weight_gradients"),
        ("CallerMemory", "uniep_caller_memory"),
        ("MemoryNeed", "uniep_memory_need"),
        ("ForwardArguments", "uniep_forward_arguments"),
        ("BackwardArguments", "uniep_backward_arguments"),
        ("WeightGradientArguments", "uniep_weight_gradient_arguments"),
    ],
)
def test_a_structure_for_c_has_the_fields_of_cpp_in_their_order(name, c_name):
    own = fields("c_layer.h", f"typedef struct {c_name}")
    assert [field for field in own if field != "size"] == fields("layer.h", f"struct {name}")
