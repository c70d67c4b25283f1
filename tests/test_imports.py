"""Which package may import which, and what nobody may: read off the tree's syntax, and proved by one process."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("pd_kernels", "pdserve", "kv_transfer", "prefill_node", "decode_node", "coordinator", "bench")
HEAVY = ("torch", "transformers", "triton", "safetensors.torch", "accelerate")

# who -> what it may import of ours; the longest prefix that matches counts
ALLOWED = {
    "pd_kernels": ("pd_kernels",),
    "pdserve": ("pdserve",),
    "pdserve.model": ("pdserve", "pd_kernels"),
    "pdserve.worker": ("pdserve", "pd_kernels", "kv_transfer"),
    "pdserve.cli": OURS,  # the top: it and child start everything else
    "pdserve.__main__": ("pdserve",),
    "pdserve.child": OURS,
    "kv_transfer": ("kv_transfer", "pdserve"),
    "prefill_node": ("prefill_node", "pdserve", "kv_transfer", "pd_kernels"),
    "decode_node": ("decode_node", "pdserve", "kv_transfer", "pd_kernels"),
    "coordinator": ("coordinator", "pdserve"),
    "bench": OURS,
}
TORCH_FREE = ("coordinator", "kv_transfer", "pdserve", "bench.simulate")
MAY_USE_TORCH = ("pdserve.model", "pdserve.worker", "pdserve.cli_doctor", "pdserve.computing")


def modules():
    """Every module of the product: dotted name -> path."""
    found = {}
    for package in OURS:
        base = ROOT / "kernels" if package == "pd_kernels" else ROOT
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()
BY_ITSELF = ("pd_kernels.cpu.build",)  # pd_kernels imports nothing of ours, so it finds the user's cache itself


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def under(name, prefix):
    return (
        name == prefix or name.startswith(prefix + ".") or (prefix == "pdserve.cli" and name.startswith(prefix + "_"))
    )


def imported(path, *, at_top_only=False):
    """Absolute names that a file imports; `from a import b` counts as both a and a.b."""
    tree = tree_of(path)
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if at_top_only and id(node) in late:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def rule_for(name):
    return max((prefix for prefix in ALLOWED if under(name, prefix)), key=len)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_place_allows(name):
    allowed = ALLOWED[rule_for(name)]
    wrong = [
        other
        for other in imported(MODULES[name])
        if other.split(".")[0] in OURS and not any(under(other, prefix) for prefix in allowed)
    ]
    assert not wrong, f"{name} may import {allowed}, but imports {wrong}"


def test_shared_modules_know_neither_the_model_nor_the_worker():
    for name, path in MODULES.items():
        if rule_for(name) == "pdserve":
            heavy = [
                other
                for other in imported(path, at_top_only=True)
                if under(other, "pdserve.worker") or under(other, "pdserve.model.runner")
            ]
            assert not heavy, f"{name} imports {heavy}"


def test_the_torch_free_half_imports_no_torch_when_it_is_imported():
    for name, path in MODULES.items():
        if any(under(name, prefix) for prefix in TORCH_FREE) and not any(under(name, p) for p in MAY_USE_TORCH):
            heavy = [other for other in imported(path, at_top_only=True) if other.split(".")[0] in HEAVY]
            assert not heavy, f"{name} imports {heavy}"


def test_nobody_imports_the_name_kernels_or_a_pickle():
    banned = ("kernels", "pickle", "cloudpickle", "dill", "shelve", "marshal")
    for name, path in MODULES.items():
        wrong = [other for other in imported(path) if other.split(".")[0] in banned]
        assert not wrong, f"{name} imports {wrong}"


def test_nobody_calls_what_runs_received_data_as_code():
    calls = ("eval", "exec", "recv_pyobj", "send_pyobj")
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func)
            is_method = function.rpartition(".")[2] in ("recv_pyobj", "send_pyobj")
            assert function not in calls, f"{name}:{node.lineno} calls {function}"
            assert not is_method, f"{name}:{node.lineno} calls {function}"
            assert function not in ("torch.load", "numpy.load", "np.load"), f"{name}:{node.lineno} calls {function}"


def test_the_environment_is_read_in_one_place():
    readers = {
        name
        for name, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert readers <= {"pdserve.config", *BY_ITSELF}, readers


def test_every_module_says_what_it_is():
    silent = [
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and ast.get_docstring(tree_of(path)) is None
    ]
    assert not silent


LIGHT = [
    "coordinator.core",
    "coordinator.frontend.app",
    "coordinator.frontend.main",
    "coordinator.supervisor",
    "coordinator.admin",
    "pdserve.cli",
    "bench.load",
]


def test_core_front_end_supervisor_and_command_line_start_without_torch():
    present = [name for name in LIGHT if name in MODULES]
    code = (
        f"import importlib, sys\nfor name in {present!r}: importlib.import_module(name)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
