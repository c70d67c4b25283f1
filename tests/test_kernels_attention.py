"""Attention over the paged cache: the native kernels against the reference, unused memory poisoned with NaN."""

import platform

import pytest
import torch
from kernel_kit import Case, assert_close, naive, pool_of, run_decode, run_prefill, with_dtype

from pd_kernels.cpu.attention import CpuDecode, CpuPrefill
from pd_kernels.cpu.build import Toolchain
from pd_kernels.cpu.library import load
from pd_kernels.reference import decode_attention, prefill_attention

ARCHES = ["native", "x86-64-v3"] if platform.machine() == "x86_64" else ["native"]
RAGGED = Case(contexts=[1, 15, 16, 17, 33, 100], queries=[1, 3, 16, 17, 2, 50])
GROUPS = [Case(contexts=[5, 40], queries=[5, 7], kv_heads=1 + (g == 3), group=g) for g in (1, 3, 4, 7, 8)]
DIMS = [Case(contexts=[19, 35], queries=[19, 20], dim=d) for d in (16, 32, 64, 80, 96, 128, 256)]
BLOCKS = [Case(contexts=[9, 70], queries=[9, 65], block_size=b) for b in (1, 5, 16, 64)]
LONG = [
    Case(contexts=[c], queries=[q], kv_heads=1) for c, q in ((255, 255), (256, 10), (257, 257), (600, 344), (700, 30))
]
PREFILL = [RAGGED, *GROUPS, *DIMS, *BLOCKS, *LONG, Case(contexts=[64, 20, 30], queries=[64, 0, 30])]
DECODE = [
    Case(contexts=contexts, queries=[1] * len(contexts), **more)
    for contexts, more in [
        ([1], {}),
        ([1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300], {}),
        *(([3, 50], {"group": g}) for g in (1, 3, 4, 7, 8, 20)),
        *(([20, 150], {"dim": d}) for d in (16, 32, 64, 80, 96, 128, 256)),
        *(([9, 140], {"block_size": b}) for b in (1, 5, 16, 64)),
    ]
]


@pytest.mark.parametrize("case", [RAGGED, DIMS[3], GROUPS[3]], ids=str)
def test_the_reference_prefill_is_attention_by_definition(case):
    q, kv, tables = pool_of(case)
    assert_close(run_prefill(prefill_attention, case, q, kv, tables), naive(case, q, kv, tables), case.dtype)


@pytest.mark.parametrize("case", [DECODE[1], DECODE[5]], ids=str)
def test_the_reference_decode_is_attention_by_definition(case):
    q, kv, tables = pool_of(case)
    assert_close(run_decode(decode_attention, case, q, kv, tables), naive(case, q, kv, tables), case.dtype)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_native_prefill_equals_the_reference(case, dtype, arch):
    q, kv, tables = pool_of(with_dtype(case, dtype))
    expected = run_prefill(prefill_attention, case, q.float(), kv.float(), tables)
    actual = run_prefill(CpuPrefill(load(Toolchain(arch=arch))), case, q, kv, tables)
    assert_close(actual, expected, dtype)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DECODE, ids=str)
def test_native_decode_equals_the_reference(case, dtype, arch):
    q, kv, tables = pool_of(with_dtype(case, dtype))
    expected = run_decode(decode_attention, case, q.float(), kv.float(), tables)
    actual = run_decode(CpuDecode(load(Toolchain(arch=arch))), case, q, kv, tables)
    assert_close(actual, expected, dtype)


def test_a_chunk_of_one_token_equals_the_same_token_decoded():
    case = Case(contexts=[77, 130], queries=[1, 1])
    q, kv, tables = pool_of(case)
    library = load(Toolchain())
    prefilled = run_prefill(CpuPrefill(library), case, q, kv, tables)
    assert torch.equal(prefilled, run_decode(CpuDecode(library), case, q, kv, tables))


def test_two_threads_give_the_same_bits_as_one():
    case = Case(contexts=[300, 40, 9], queries=[300, 40, 1])
    q, kv, tables = pool_of(case)
    kernel, before = CpuPrefill(load(Toolchain())), torch.get_num_threads()
    single = run_prefill(kernel, case, q, kv, tables)
    torch.set_num_threads(2)
    try:
        double = run_prefill(kernel, case, q, kv, tables)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(single, double)


def test_scores_far_apart_do_not_overflow():
    case = Case(contexts=[200], queries=[40])
    q, kv, tables = pool_of(case)
    q *= 1e4
    expected = run_prefill(prefill_attention, case, q, kv, tables)
    assert_close(run_prefill(CpuPrefill(load(Toolchain())), case, q, kv, tables), expected, case.dtype)


def test_block_ids_beyond_two_to_the_31_elements_are_addressed_right():
    num_blocks, heads, block_size, dim = 70_000, 2, 16, 64  # 2.3e9 elements per layer stride, virtual until touched
    pool = torch.empty((num_blocks, 8, 2, heads, block_size, dim), dtype=torch.bfloat16)
    kv = pool[:, 7]
    kv[-1] = torch.randn(2, heads, block_size, dim).to(torch.bfloat16)
    case = Case(contexts=[16], queries=[1], group=1, dtype=torch.bfloat16)
    q, tables = torch.randn(1, heads, dim).to(torch.bfloat16), torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    expected = run_decode(decode_attention, case, q.float(), kv[-1:].float(), torch.zeros_like(tables))
    assert pool.numel() > 2**31
    assert_close(run_decode(CpuDecode(load(Toolchain())), case, q, kv, tables), expected, torch.bfloat16)


def test_a_cache_of_another_dtype_is_refused_by_shape():
    case = Case(contexts=[4], queries=[4])
    q, kv, tables = pool_of(case)
    with pytest.raises(ValueError, match="bfloat16"):
        run_prefill(CpuPrefill(load(Toolchain())), case, q, kv.to(torch.bfloat16), tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoded_sequence_does_not_depend_on_its_batch_mates(dtype):
    case = Case(contexts=[70, 5, 300], queries=[1, 1, 1], dtype=dtype)
    q, kv, tables = pool_of(case)
    kernel = CpuDecode(load(Toolchain()))
    together = run_decode(kernel, case, q, kv, tables)
    for r, context in enumerate(case.contexts):
        alone = run_decode(kernel, Case(contexts=[context], queries=[1]), q[r : r + 1], kv, tables[r : r + 1])
        assert torch.equal(alone[0], together[r])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_threads_decode_the_same_bits_as_one_by_heads_and_by_sequences(dtype):
    kernel, before = CpuDecode(load(Toolchain())), torch.get_num_threads()
    for contexts in ([200], [33, 90, 64]):
        case = Case(contexts=contexts, queries=[1] * len(contexts), kv_heads=3, dtype=dtype)
        q, kv, tables = pool_of(case)
        torch.set_num_threads(1)
        single = run_decode(kernel, case, q, kv, tables)
        torch.set_num_threads(2)
        try:
            assert torch.equal(run_decode(kernel, case, q, kv, tables), single)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_kv_heads_are_decoded_in_several_passes(dtype):
    case = Case(contexts=[40, 17], queries=[1, 1], kv_heads=11, group=2, dtype=dtype)
    q, kv, tables = pool_of(case)
    expected = run_decode(decode_attention, case, q.float(), kv.float(), tables)
    for arch in ARCHES:
        assert_close(run_decode(CpuDecode(load(Toolchain(arch=arch))), case, q, kv, tables), expected, dtype)
