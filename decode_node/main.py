"""The decode worker's process."""

from __future__ import annotations

from typing import Any

from decode_node.node import DecodeNode
from pdserve.worker.process import run_worker


def main(config: dict[str, Any]) -> int:
    return run_worker(config, DecodeNode)
