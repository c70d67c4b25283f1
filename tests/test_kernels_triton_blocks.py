"""Blocks between a pool and a staging buffer: the bytes that were asked for, all of them, and no other."""

import pytest
import torch

from pd_kernels.triton.blocks import gather, scatter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

each = pytest.mark.parametrize


def random_bytes(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)


def pool_of(dtype=torch.float16, *, num_blocks=9, layers=3, dim=16):
    """Random bits, NaN among them: [num_blocks, layers, 2, kv_heads, block_size, head_dim]."""
    shape = (num_blocks, layers, 2, 2, 4, dim)
    return random_bytes(*shape[:-1], dim * dtype.itemsize).view(dtype)


def flat(pool):
    return pool.flatten(1).view(torch.uint8)


def ids_of(*ids):
    return torch.tensor(ids, dtype=torch.int64, device=DEVICE)


@each("ids", [(), (4,), (8, 0, 3), tuple(range(9))], ids=str)
@each("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_blocks_gathered_from_one_pool_and_scattered_into_another_are_equal(dtype, ids):
    pool, other, ids = pool_of(dtype), torch.zeros_like(pool_of(dtype)), ids_of(*ids)
    staging = random_bytes(len(ids), flat(pool).shape[1], seed=1)
    gather(pool, ids, staging)
    assert torch.equal(staging, flat(pool)[ids])
    scatter(other, ids, staging)
    expected = torch.zeros_like(flat(pool))
    expected[ids] = flat(pool)[ids]
    assert torch.equal(flat(other), expected)


@each("part", [(0, 1), (1, 2), (0, 3), (2, 1)], ids=str)
def test_a_range_of_layers_is_copied_alone(part):
    pool, ids = pool_of(), ids_of(7, 1, 2)
    layer_bytes = flat(pool).shape[1] // 3
    offset, size = (layers * layer_bytes for layers in part)
    staging = random_bytes(3, size, seed=1)
    gather(pool, ids, staging, offset=offset, size=size)
    assert torch.equal(staging, flat(pool)[ids, offset : offset + size])
    expected = flat(pool).clone()
    sent = random_bytes(3, size, seed=2)
    expected[ids, offset : offset + size] = sent
    scatter(pool, ids, sent, offset=offset, size=size)
    assert torch.equal(flat(pool), expected)


@each(("offset", "size"), [(0, 1), (1, 7), (2, 30), (4, 12), (8, 4096), (6, 5001), (3, 8192)])
def test_any_offset_and_size_are_copied_exactly(offset, size):
    pool, ids = random_bytes(5, 8200), ids_of(3, 0)
    staging = random_bytes(2, size, seed=1)
    gather(pool, ids, staging, offset=offset, size=size)
    assert torch.equal(staging, pool[ids, offset : offset + size])
    expected, sent = pool.clone(), random_bytes(2, size, seed=2)
    expected[ids, offset : offset + size] = sent
    scatter(pool, ids, sent, offset=offset, size=size)
    assert torch.equal(pool, expected)


def test_buffers_that_start_anywhere_are_copied_exactly():
    pool, staging = random_bytes(5 * 64 + 1)[1:].view(5, 64), random_bytes(2, 70, seed=1)[:, 3:67]
    edges = staging._base.clone()
    gather(pool, ids_of(4, 2), staging)
    assert torch.equal(staging, pool[[4, 2]])
    assert torch.equal(staging._base[:, :3], edges[:, :3])
    assert torch.equal(staging._base[:, 67:], edges[:, 67:])


def test_ids_outside_of_the_pool_move_nothing():
    pool, staging = pool_of(), random_bytes(4, 1536, seed=1)
    before, ids = staging.clone(), ids_of(-1, 2, 9, -(2**40))
    gather(pool, ids, staging)
    assert torch.equal(staging[1], flat(pool)[2])
    assert torch.equal(staging[[0, 2, 3]], before[[0, 2, 3]])
    expected = flat(pool).clone()
    expected[2] = before[1]
    scatter(pool, ids, before)
    assert torch.equal(flat(pool), expected)


def test_blocks_beyond_two_to_the_31_bytes_are_addressed_right():
    pool = torch.empty((70_000, 1 << 16), dtype=torch.uint8, device=DEVICE)  # 4.6e9 bytes, virtual until touched
    pool[-1] = random_bytes(1 << 16)
    staging = torch.zeros((1, 1 << 16), dtype=torch.uint8, device=DEVICE)
    gather(pool, ids_of(69_999), staging)
    assert torch.equal(staging[0], pool[-1])


def test_other_shapes_are_refused():
    pool, staging = pool_of(), random_bytes(2, 1536)
    for refused in (
        lambda: gather(pool, ids_of(1, 2, 3), staging),
        lambda: gather(pool, ids_of(1, 2), staging, offset=8),
        lambda: gather(pool, ids_of(1, 2), staging, offset=8, size=1536),
        lambda: gather(pool, ids_of(1, 2).int(), staging),
        lambda: scatter(pool.transpose(1, 2), ids_of(1, 2), staging),
        lambda: scatter(pool, ids_of(1, 2), staging.view(torch.int8)),
    ):
        with pytest.raises(ValueError, match=r"\(9, "):
            refused()
