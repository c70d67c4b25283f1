import subprocess
import sys


def start(kind, stdin):
    return subprocess.run(
        [sys.executable, "-m", "pdserve.child", kind], input=stdin, capture_output=True, timeout=60, check=False
    )


def test_a_child_whose_parent_vanishes_before_it_is_configured_ends():
    assert start("core", b"").returncode == 3
