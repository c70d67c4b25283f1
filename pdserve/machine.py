"""What this machine offers: allowed cores, memory that may still be taken, GPUs; and who gets which device.

Owns the rules that turn counts into devices, cores and pool sizes; starts nothing and never imports torch.
Invariant: two workers share a device only when there are more workers than devices, and a note says so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import EngineOptions, PoolOptions, Role, visible_gpus
from pdserve.errors import ConfigError
from pdserve.layout import KVLayout
from pdserve.options import device_list, memory_shares

DEFAULT_KV_SHARE = 0.2  # of available memory, per worker
MOST_KV_SHARE = 0.8  # of available memory, all workers together
FEWEST_BLOCKS = 4  # the null block and room for one short sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device a worker can own. `memory_share` is of a GPU's memory, for a worker of each role."""

    name: str
    cores: tuple[int, ...]  # empty: not pinned
    memory_share: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    role: Role
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Where the workers of the start go, which devices later ones may use, and what has to be said aloud."""

    devices: tuple[Device, ...]
    placements: tuple[Placement, ...]
    notes: tuple[str, ...]


def allowed_cores() -> tuple[int, ...]:
    """The cores this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def slot_cores(cores: Sequence[int], num_slots: int) -> list[tuple[int, ...]]:
    """`num_slots` equal shares of `cores`; what is left over stays with nobody. Raises `ConfigError`."""
    if num_slots > len(cores):
        raise ConfigError(
            f"--cpu-slots is {num_slots}, but only {len(cores)} cores are allowed; it must be at most that"
        )
    size = len(cores) // num_slots
    return [tuple(cores[index * size : (index + 1) * size]) for index in range(num_slots)]


def least_used(devices: Sequence[Device], used: Mapping[str, int]) -> Device:
    """The device with the fewest workers, the first of those that tie."""
    return min(devices, key=lambda device: used.get(device.name, 0))


def plan_devices(pools: PoolOptions, cores: Sequence[int], num_gpus: int) -> DevicePlan:
    """A device for each worker, prefill workers first. Raises `ConfigError` for devices that are not there."""
    counts: tuple[tuple[Role, int], ...] = (("prefill", pools.prefill), ("decode", pools.decode))
    roles = [role for role, count in counts for _ in range(count)]
    notes: list[str] = []
    if pools.devices is not None:
        devices = _named(device_list(pools.devices), pools, cores, num_gpus)
    elif num_gpus:
        devices = [_gpu(f"cuda:{index}", pools, is_shared=len(roles) > num_gpus) for index in range(num_gpus)]
    else:
        devices = _cpu(pools.cpu_slots or min(len(roles), len(cores)), cores)
    if len(roles) > len(devices):
        names = ", ".join(device.name for device in devices)
        notes.append(f"{len(roles)} workers share {len(devices)} device{'s'[: len(devices) != 1]} ({names})")
        if any(device.name.startswith("cuda") for device in devices):
            notes.append(f"shares of a GPU's memory: {pools.gpu_memory_share} (--gpu-memory-share)")
    used: dict[str, int] = {}
    placements: list[Placement] = []
    for role in roles:
        device = least_used(devices, used)
        used[device.name] = used.get(device.name, 0) + 1
        placements.append(Placement(role=role, device=device))
    return DevicePlan(devices=tuple(devices), placements=tuple(placements), notes=tuple(notes))


def _cpu(num_slots: int, cores: Sequence[int]) -> list[Device]:
    shares = slot_cores(cores, num_slots)
    return [Device(name=f"cpu:{index}", cores=share, memory_share={}) for index, share in enumerate(shares)]


def _gpu(name: str, pools: PoolOptions, *, is_shared: bool) -> Device:
    share = memory_shares(pools.gpu_memory_share) if is_shared else {"prefill": 0.9, "decode": 0.9}
    return Device(name=name, cores=(), memory_share=share)


def _named(
    names: Sequence[str], pools: PoolOptions, cores: Sequence[int], num_gpus: int, flag: str = "--devices"
) -> list[Device]:
    """The devices that `flag` names, each once."""
    num_workers = pools.prefill + pools.decode
    unique = list(dict.fromkeys(names))
    highest = max((int(name[4:]) for name in unique if name.startswith("cpu:")), default=-1)
    if pools.cpu_slots is None and highest >= len(cores):
        raise ConfigError(f"{flag} names cpu:{highest}, but there are {len(cores)} cores, counted from 0")
    slots = _cpu(pools.cpu_slots or max(highest + 1, min(len(unique), len(cores))), cores) if highest >= 0 else []
    devices = []
    for name in unique:
        number = int(name.partition(":")[2])
        available = num_gpus if name.startswith("cuda") else len(slots)
        if number >= available:
            kind = "GPUs" if name.startswith("cuda") else "CPU slots"
            raise ConfigError(f"{flag} names {name}, but there are {available} {kind}, counted from 0")
        is_shared = num_workers > len(unique)
        devices.append(_gpu(name, pools, is_shared=is_shared) if name.startswith("cuda") else slots[number])
    return devices


def device_by_hand(name: str, pools: PoolOptions, cores: Sequence[int], num_gpus: int) -> Device:
    """The device of a worker started by itself; --prefill and --decode tell how many share this machine."""
    number = int(device_list(name)[0].partition(":")[2])
    num_workers = pools.prefill + pools.decode
    num_slots = pools.cpu_slots or min(len(cores), max(num_workers, number + 1))
    return _named([name], dataclasses.replace(pools, cpu_slots=num_slots), cores, num_gpus, "--device")[0]


def count_gpus() -> int:
    """GPUs that NVML lists, at most the visible ones; 0 without a driver."""
    import pynvml

    visible = visible_gpus()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    return count if visible is None else min(count, visible)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """What may still be taken: the least of MemAvailable and what each cgroup above us leaves."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for left in _cgroup_leaves(root):
        available = min(available, left)
    return max(available, 0)


def _cgroup_leaves(root: Path) -> list[int]:
    """Bytes that each limited memory cgroup above this process leaves, reclaimable file pages counted as free."""
    leaves: list[int] = []
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return leaves
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            left = _cgroup_left(level, limit_name, usage_name)
            if left is not None:
                leaves.append(left)
            if level == base:
                break
    return leaves


def _cgroup_left(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return int(limit) - usage + reclaimable


def pool_blocks(
    engine: EngineOptions, layout: KVLayout, available_bytes: int, num_workers: int, *, share: float | None = None
) -> int:
    """Blocks of one worker's pool, the null block included, when `num_workers` pools share `available_bytes`.

    `share` of the memory is taken where no size is given. Raises `ConfigError` when the pool does not fit, or could not
    hold one sequence of an explicit --max-model-len.
    """
    share = min(DEFAULT_KV_SHARE, MOST_KV_SHARE / num_workers) if share is None else share
    if engine.kv_blocks is not None:
        num_blocks, origin = engine.kv_blocks, f"--kv-blocks {engine.kv_blocks}"
    elif engine.kv_memory_gb is not None:
        num_blocks, origin = (
            int(engine.kv_memory_gb * 1e9) // layout.block_bytes,
            f"--kv-memory-gb {engine.kv_memory_gb:g}",
        )
    else:
        num_blocks, origin = int(available_bytes * share) // layout.block_bytes, f"{share:.0%} of available memory"
    wanted = num_blocks * layout.block_bytes * num_workers
    if wanted > available_bytes:
        raise ConfigError(
            f"{origin} for {num_workers} workers is {wanted / 1e9:.2f} GB of KV, but "
            f"{available_bytes / 1e9:.2f} GB are available; give less"
        )
    needed = FEWEST_BLOCKS if engine.max_model_len is None else layout.blocks_for(engine.max_model_len) + 1
    if num_blocks < max(needed, FEWEST_BLOCKS):
        raise ConfigError(
            f"{origin} is a pool of {num_blocks} blocks of {layout.block_bytes} bytes; at least "
            f"{max(needed, FEWEST_BLOCKS)} are needed, so give --kv-blocks {max(needed, FEWEST_BLOCKS)} or more"
        )
    return num_blocks
