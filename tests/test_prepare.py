"""What `pdserve up` decides once for all its processes."""

import dataclasses

import pytest

from coordinator.prepare import Prepared, check_free, check_writable, listen, with_block_size
from pdserve.errors import ConfigError
from pdserve.machine import Device, DevicePlan, Placement
from pdserve.options import resolve


def plan(*names):
    devices = tuple(Device(name=name, cores=(), memory_share={}) for name in dict.fromkeys(names))
    by_name = {device.name: device for device in devices}
    placements = tuple(Placement(role="decode", device=by_name[name]) for name in names)
    return DevicePlan(devices=devices, placements=placements, notes=())


@pytest.mark.parametrize(
    ("names", "asked", "size"),
    [
        (["cpu:0", "cpu:1"], None, 16),
        (["cuda:0"], None, 64),
        (["cuda:0", "cpu:0"], None, 16),
        (["cpu:0", "cuda:0"], None, 16),
        (["cuda:0", "cpu:0"], 32, 32),
    ],
)
def test_all_workers_have_one_block_size(names, asked, size):
    config = with_block_size(resolve({"block-size": asked}), plan(*names))
    assert {config.engine.block_size_on(name) for name in names} == {size}


@pytest.mark.parametrize(
    ("names", "kv_blocks", "asked", "limit"),
    [
        (["cpu:0"], 100, None, 1584),
        (["cuda:0"], 0, None, 0),
        (["cuda:0"], 0, 512, 512),
        (["cuda:0", "cpu:0"], 100, None, 0),
    ],
)
def test_the_core_learns_the_limit_of_workers_that_decide_for_themselves(names, kv_blocks, asked, limit):
    fields = dict.fromkeys(field.name for field in dataclasses.fields(Prepared))
    config = resolve({"max-model-len": asked})
    prepared = Prepared(
        **fields | {"config": config, "devices": plan(*names), "kv_blocks": kv_blocks, "max_model_len": 1584}
    )
    assert prepared.core_limit == limit


def test_a_taken_control_port_is_found_before_anything_starts():
    with listen("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--control {port} on 127.0.0.1: Address already in use"):
            check_free(f"127.0.0.1:{port}")
    check_free(f"127.0.0.1:{port}")


def test_a_ready_file_that_cannot_be_written_is_found_too(tmp_path):
    check_writable(tmp_path / "ready", "--ready-file")
    assert list(tmp_path.iterdir()) == []
    for path in (tmp_path / "no" / "ready", tmp_path):
        with pytest.raises(ConfigError, match="--ready-file"):
            check_writable(path, "--ready-file")
