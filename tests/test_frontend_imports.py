"""What the front end must not drag in."""

import subprocess
import sys
from pathlib import Path

import coordinator.frontend

ROOT = Path(__file__).parent.parent


def test_the_front_end_imports_neither_torch_nor_transformers():
    names = sorted(path.stem for path in Path(coordinator.frontend.__file__).parent.glob("[a-z]*.py"))
    program = f"""
import importlib, sys
for name in {names}:
    importlib.import_module("coordinator.frontend." + name)
print(sorted({{"torch", "transformers", "numpy", "safetensors"}} & sys.modules.keys()))
"""
    paths = f"{ROOT}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": paths}
    )
    assert done.stdout.strip() == "[]"
