"""The one choice point: what is chosen, what is refused, and how native code is built, cached and done without."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pd_kernels import KernelError, describe, select
from pd_kernels.cpu.build import BuildError, Toolchain, build
from pd_kernels.cpu.library import load

NO_COMPILER = Toolchain(compilers=("no-such-compiler",))


def test_auto_on_cpu_is_native_and_says_for_which_instructions():
    kernels = select("cpu", "bfloat16", 64)
    assert kernels.name == "cpu"
    assert load(Toolchain()).isa in kernels.why


def test_auto_on_cuda_is_the_reference_and_says_why():
    kernels = select("cuda:0", "bfloat16", 64)
    assert kernels.name == "reference"
    assert "finds no GPU" in kernels.why


def test_interpreted_triton_kernels_can_be_forced_on_a_cpu():
    kernels = select("cpu", "float32", 64, force="triton")
    assert (kernels.name, kernels.why) == ("triton", "triton: interpreted on the CPU, float32")


@pytest.mark.parametrize(("dtype", "head_dim", "reason"), [("float16", 64, "float16"), ("float32", 72, "72")])
def test_what_native_code_cannot_do_falls_back_by_name_or_is_refused_when_forced(dtype, head_dim, reason):
    assert reason in select("cpu", dtype, head_dim).why
    with pytest.raises(KernelError, match=reason):
        select("cpu", dtype, head_dim, force="cpu")


def test_the_reference_can_be_forced():
    assert select("cpu", "float32", 64, force="reference").name == "reference"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("cpu", "float32", 64, "cutlass"), "auto, reference, cpu, triton"),
        (("cpu", "bfloat16", 64, "triton"), "bfloat16"),
        (("cpu", "float32", 512, "triton"), "512"),
        (("tpu:0", "bfloat16", 64), "tpu:0"),
        (("cpu", "int8", 64), "int8"),
        (("cpu", "float32", 63), "63"),
        (("cuda:0", "bfloat16", 64, "cpu"), "cuda"),
    ],
)
def test_an_impossible_choice_is_refused_by_name(arguments, named):
    with pytest.raises(KernelError, match=named):
        select(*arguments)


def test_without_a_compiler_the_reference_serves_and_says_so():
    kernels = select("cpu", "bfloat16", 64, tools=NO_COMPILER)
    assert kernels.name == "reference"
    assert "no C++ compiler found (looked for no-such-compiler)" in kernels.why


def test_without_a_compiler_forced_native_code_is_an_error():
    with pytest.raises(KernelError, match="no-such-compiler"):
        select("cpu", "bfloat16", 64, force="cpu", tools=NO_COMPILER)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_broken_compiler_is_reported_in_one_line(tmp_path):
    broken = script(
        tmp_path / "cc", 'test "$1" = --version && echo cc 1.0 && exit 0\necho "x: error: broken" >&2; exit 1'
    )
    kernels = select("cpu", "float32", 64, tools=Toolchain(compilers=(broken,), folder=tmp_path / "cache"))
    assert kernels.why.endswith("cc failed: x: error: broken")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("in the way")
    kernels = select("cpu", "float32", 64, tools=Toolchain(folder=tmp_path / "file" / "kernels"))
    assert kernels.name == "reference"
    assert "cannot write kernels to" in kernels.why


def fake_compiler(tmp_path):
    """A compiler that logs each call and writes its name into whatever `-o` asks for."""
    text = f'echo run >> {tmp_path}/log\nfor last; do :; done\n[ "$last" = --version ] || echo library > "$last"'
    return Toolchain(compilers=(script(tmp_path / "cc", text),), folder=tmp_path / "cache")


def test_a_library_is_compiled_once_and_then_taken_from_the_cache(tmp_path):
    tools = fake_compiler(tmp_path)
    first = build(tools)
    calls = (tmp_path / "log").read_text()
    assert build(tools) == first
    assert (tmp_path / "log").read_text() == calls
    assert [path.name for path in tools.folder.iterdir()] == [first.name]


def test_racing_builds_agree_on_one_complete_file(tmp_path):
    tools = fake_compiler(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build, [tools] * 4))
    assert len(paths) == 1
    assert paths.pop().read_text() == "library\n"
    assert len(list(tools.folder.iterdir())) == 1


def test_other_flags_are_another_file(tmp_path):
    tools = fake_compiler(tmp_path)
    other = Toolchain(compilers=tools.compilers, folder=tools.folder, arch="x86-64-v3")
    assert build(tools) != build(other)


def test_a_cached_file_that_does_not_load_is_built_again_before_giving_up(tmp_path):
    tools = fake_compiler(tmp_path)
    with pytest.raises(BuildError, match="do not load"):
        load(tools)
    runs = (tmp_path / "log").read_text().count("run")
    assert runs >= 2 * 6  # both times all sources were compiled


def test_doctor_lines_name_the_compiler_the_cache_and_the_instructions():
    text = "\n".join(describe())
    assert str(Toolchain().folder) in text
    assert load(Toolchain()).isa in text
    assert "no C++ compiler" in "\n".join(describe(NO_COMPILER))


def test_the_kernels_package_imports_nothing_of_the_server():
    code = "import sys, pd_kernels; print([m for m in sys.modules if m.split('.')[0] in ('pdserve', 'transformers')])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert answer.stdout.strip() == "[]"


def _environment():
    import os

    return {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_a_set_computes_a_layer_from_end_to_end():
    native, reference = (select("cpu", "float32", 16, force=name).layer for name in ("cpu", "reference"))
    x, weight = torch.randn(3, 64), torch.randn(64, 64)
    expected = reference.silu_mul(reference.pack_linear(weight, None)(reference.rms_norm(x, weight[0], 1e-5)))
    actual = native.silu_mul(native.pack_linear(weight, None)(native.rms_norm(x, weight[0], 1e-5)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
