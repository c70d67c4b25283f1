import mmap
import os

import numpy as np
import pytest

from kv_transfer.memory import HUGE_PAGE_BYTES, PoolMemory, check_fits
from kv_transfer.pool import Pool, num_test_blocks, pattern_of, total_blocks
from kv_transfer.syscalls import full_fence, one_iovec, read_process, why_forbidden
from pdserve.errors import ConfigError


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_zero_writable_and_as_long_as_asked(shared):
    memory = PoolMemory.allocate(3 * HUGE_PAGE_BYTES + 100, shared=shared)
    assert len(memory.buffer) == 3 * HUGE_PAGE_BYTES + 100
    assert not memory.buffer.any()
    memory.buffer[-1] = 7
    memory.close()


def test_private_memory_is_aligned_to_huge_pages_and_says_what_it_got():
    memory = PoolMemory.allocate(2 * HUGE_PAGE_BYTES, shared=False)
    assert memory.address % HUGE_PAGE_BYTES == 0
    assert memory.page_kind.startswith(("2 MiB", "4 KiB"))


def test_every_page_is_there_before_anybody_writes():
    memory = PoolMemory.allocate(4 * HUGE_PAGE_BYTES, shared=False)
    resident = 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            fields = line.split()
            if "-" in fields[0]:
                start, end = (int(part, 16) for part in fields[0].split("-"))
                inside = start < memory.address + len(memory.buffer) and end > memory.address
            elif fields[0] == "Rss:" and inside:
                resident += int(fields[1]) * 1024
    assert resident >= len(memory.buffer)


def test_a_shared_pool_cannot_be_resized_or_mapped_writable_by_others():
    memory = PoolMemory.allocate(HUGE_PAGE_BYTES, shared=True)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, HUGE_PAGE_BYTES)
    memory.close()


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_is_left_in_dev_shm(shared):
    before = os.listdir("/dev/shm")
    memory = PoolMemory.allocate(HUGE_PAGE_BYTES, shared=shared)
    assert os.listdir("/dev/shm") == before
    memory.close()


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"needs 3\.00 GiB, but only 2\.00 GiB"):
        check_fits(3 * 2**30, 2 * 2**30)
    with pytest.raises(ConfigError, match="lower --kv-memory-gb or --kv-blocks"):
        PoolMemory.allocate(2**60, shared=False)


def test_the_pool_proper_ends_before_the_test_blocks():
    pool = Pool(num_blocks=5, block_bytes=4096, epoch="e", shared=False)
    assert len(pool.buffer) == 5 * 4096
    assert (pool.test_blocks.start, pool.scratch_blocks.stop) == (5, total_blocks(5, 4096))
    assert np.array_equal(pool.bytes_of(6), pattern_of(1, 4096))
    pool.close()


def test_no_two_test_blocks_are_alike():
    assert not np.array_equal(pattern_of(0, 1000), pattern_of(1, 1000))
    assert len(pattern_of(0, 1001)) == 1001


@pytest.mark.parametrize(("block_bytes", "expected"), [(4096, 16), (2**20, 4), (2**24, 1)])
def test_test_blocks_are_about_four_mebibytes_and_at_least_one(block_bytes, expected):
    assert num_test_blocks(block_bytes) == expected


def test_a_process_can_read_itself_and_is_told_of_a_process_that_is_not_there():
    source, found = np.arange(16, dtype=np.uint8), np.zeros(16, dtype=np.uint8)
    local, remote = one_iovec(found.ctypes.data, 16), one_iovec(source.ctypes.data, 16)
    assert read_process(os.getpid(), local, remote) == 16
    assert (found == source).all()
    with pytest.raises(ProcessLookupError):
        read_process(2**22 + 1, local, remote)


def test_the_fence_works_here():
    full_fence()
    assert isinstance(why_forbidden(), str)
