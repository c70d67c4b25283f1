"""Who gets which device, cores and how much memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config import EngineOptions, PoolOptions
from pdserve.errors import ConfigError
from pdserve.layout import KVLayout
from pdserve.machine import (
    allowed_cores,
    available_memory_bytes,
    count_gpus,
    device_by_hand,
    least_used,
    plan_devices,
    pool_blocks,
    slot_cores,
)

LAYOUT = KVLayout(model="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_size=16)  # 256 bytes


def names(plan):
    return [(placement.role[0], placement.device.name) for placement in plan.placements]


def test_slots_are_equal_shares_and_the_rest_stays_free():
    assert slot_cores([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3)]
    assert slot_cores([4, 9], 2) == [(4,), (9,)]


@given(cores=st.sets(st.integers(0, 999), min_size=1), data=st.data())
def test_slots_never_overlap_and_are_equally_large(cores, data):
    shares = slot_cores(sorted(cores), data.draw(st.integers(1, len(cores))))
    flat = [core for share in shares for core in share]
    assert len(flat) == len(set(flat)) <= len(cores)
    assert len({len(share) for share in shares}) == 1


def test_more_slots_than_cores_are_refused():
    with pytest.raises(ConfigError, match="only 2 cores"):
        plan_devices(PoolOptions(cpu_slots=3), [0, 1], num_gpus=0)


def test_each_worker_gets_a_slot_of_its_own_on_a_machine_without_gpu():
    plan = plan_devices(PoolOptions(), [0, 1, 2, 3], num_gpus=0)
    assert names(plan) == [("p", "cpu:0"), ("d", "cpu:1")]
    assert [placement.device.cores for placement in plan.placements] == [(0, 1), (2, 3)]
    assert plan.notes == ()


def test_more_workers_than_cores_share_the_least_used_and_say_so():
    plan = plan_devices(PoolOptions(prefill=2, decode=1), [0, 1], num_gpus=0)
    assert names(plan) == [("p", "cpu:0"), ("p", "cpu:1"), ("d", "cpu:0")]
    assert plan.notes == ("3 workers share 2 devices (cpu:0, cpu:1)",)


def test_two_gpus_serve_one_worker_each():
    plan = plan_devices(PoolOptions(), [0, 1], num_gpus=2)
    assert names(plan) == [("p", "cuda:0"), ("d", "cuda:1")]
    assert plan.notes == ()


def test_one_gpu_is_shared_by_both_roles_and_that_is_said():
    plan = plan_devices(PoolOptions(), [0, 1], num_gpus=1)
    assert names(plan) == [("p", "cuda:0"), ("d", "cuda:0")]
    assert plan.placements[0].device.memory_share == {"prefill": 0.4, "decode": 0.5}
    assert any("prefill=0.4,decode=0.5" in note for note in plan.notes)


def test_named_devices_are_taken_in_order():
    plan = plan_devices(PoolOptions(devices="cuda:1,cpu:0"), [0, 1], num_gpus=2)
    assert names(plan) == [("p", "cuda:1"), ("d", "cpu:0")]


def test_naming_one_slot_of_two_leaves_the_other_alone():
    plan = plan_devices(PoolOptions(devices="cpu:1", cpu_slots=2), [0, 1], num_gpus=0)
    assert [placement.device.cores for placement in plan.placements] == [(1,), (1,)]


@pytest.mark.parametrize("devices", ["cuda:0", "cpu:7"])
def test_a_device_that_is_not_there_is_named(devices):
    with pytest.raises(ConfigError, match=r"--devices names|only 2 cores"):
        plan_devices(PoolOptions(devices=devices), [0, 1], num_gpus=0)


def test_a_worker_started_by_hand_gets_its_share_of_the_cores():
    cores = [0, 1, 2, 3]
    assert device_by_hand("cpu:1", PoolOptions(), cores, num_gpus=0).cores == (2, 3)
    assert device_by_hand("cpu:1", PoolOptions(decode=3), cores, num_gpus=0).cores == (1,)
    assert device_by_hand("cpu:0", PoolOptions(cpu_slots=1), cores, num_gpus=0).cores == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="there are 0 GPUs"):
        device_by_hand("cuda:0", PoolOptions(), cores, num_gpus=0)


def test_the_least_used_device_is_the_first_of_those_that_tie():
    devices = plan_devices(PoolOptions(), [0, 1], num_gpus=0).devices
    assert least_used(devices, {"cpu:0": 1}).name == "cpu:1"
    assert least_used(devices, {}).name == "cpu:0"


def test_this_machine_has_cores_and_memory():
    assert allowed_cores()
    assert available_memory_bytes() > 0


def test_no_visible_gpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0


def machine(root, files):
    files = {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable:    2000 kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_memory_bytes(root)


def cgroup(path, limit, usage, inactive=0):
    base = f"sys/fs/cgroup/{path}"
    stat = f"anon 5\ninactive_file {inactive}\n"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": str(usage), f"{base}/memory.stat": stat}


def test_without_cgroups_the_kernels_word_counts(tmp_path):
    assert machine(tmp_path, {}) == 2000 * 1024


def test_the_tightest_cgroup_above_us_counts_and_file_pages_are_free(tmp_path):
    files = {"proc/self/cgroup": "0::/a/b\n", **cgroup("a/b", "max", 10), **cgroup("a", "1000", 600, inactive=100)}
    assert machine(tmp_path, files) == 500


def test_a_cgroup_beyond_its_limit_leaves_nothing(tmp_path):
    files = {"proc/self/cgroup": "0::/a\n", **cgroup("a", "1000", 1100)}
    assert machine(tmp_path, files) == 0


def test_version_one_cgroups_count_too(tmp_path):
    base = "sys/fs/cgroup/memory/x"
    files = {
        "proc/self/cgroup": "9:cpu:/y\n5:memory:/x\n",
        f"{base}/memory.limit_in_bytes": "700",
        f"{base}/memory.usage_in_bytes": "300",
        f"{base}/memory.stat": "total_inactive_file 0\n",
    }
    assert machine(tmp_path, files) == 400


def test_a_pool_takes_a_fifth_of_available_memory():
    assert pool_blocks(EngineOptions(), LAYOUT, 100 * 256, num_workers=2) == 20


def test_many_workers_together_leave_a_fifth():
    assert pool_blocks(EngineOptions(), LAYOUT, 100 * 256, num_workers=8) == 10


def test_a_pool_can_be_given_in_blocks_or_bytes():
    assert pool_blocks(EngineOptions(kv_blocks=7), LAYOUT, 10**9, num_workers=1) == 7
    assert pool_blocks(EngineOptions(kv_memory_gb=0.001), LAYOUT, 10**9, num_workers=1) == 10**6 // 256


def test_a_pool_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="but 0.00 GB are available"):
        pool_blocks(EngineOptions(kv_blocks=51), LAYOUT, 100 * 256, num_workers=2)


def test_a_pool_too_small_for_the_promised_length_is_refused():
    with pytest.raises(ConfigError, match="give --kv-blocks 17"):
        pool_blocks(EngineOptions(kv_blocks=16, max_model_len=256), LAYOUT, 10**9, num_workers=1)
    with pytest.raises(ConfigError, match="at least 4"):
        pool_blocks(EngineOptions(kv_memory_gb=1e-6), LAYOUT, 10**9, num_workers=1)
