"""The prefill worker's process."""

from __future__ import annotations

from typing import Any

from pdserve.worker.process import run_worker
from prefill_node.node import PrefillNode


def main(config: dict[str, Any]) -> int:
    return run_worker(config, PrefillNode)
