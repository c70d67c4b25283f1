"""Triton attention against the reference, interpreted on the CPU where there is no GPU; unused memory is NaN."""

import pytest
import torch
from kernel_kit import (
    DECODE_CASES,
    PREFILL_CASES,
    Case,
    assert_close,
    pool_of,
    prefill_batch,
    run_decode,
    run_prefill,
    with_dtype,
)

from pd_kernels.reference import decode_attention, prefill_attention
from pd_kernels.triton import tune
from pd_kernels.triton.arguments import INTERPRETED, Heads
from pd_kernels.triton.decode import TritonDecode
from pd_kernels.triton.prefill import TritonPrefill, fit, work_list
from pd_kernels.triton.splits import LONGEST_SHARE, MOST_SPLITS, num_splits
from pd_kernels.triton.tiles import TileBook, Tiles, load, save, table_tiles, tuned_path

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
OTHER = [
    Case(contexts=[9, 70], queries=[9, 33], kv_heads=1, group=2, dim=16, block_size=8),
    Case(contexts=[40, 70], queries=[9, 33], kv_heads=1, group=2, dim=32, block_size=5),
    Case(contexts=[70, 300], queries=[3, 2], kv_heads=1, group=20, dim=32, block_size=256),
    Case(contexts=[511, 40, 129, 1], queries=[3, 2, 0, 1], kv_heads=1, group=2, dim=32),
    Case(contexts=[512], queries=[15], kv_heads=1, group=1, dim=32),  # the last split is partly in the future
]


@pytest.fixture(autouse=True)
def scratch_memory_starts_as_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def expected_prefill(case):
    q, kv, tables = pool_of(case)
    return run_prefill(prefill_attention, case, q.float(), kv.float(), tables)


def expected_decode(case):
    q, kv, tables = pool_of(case)
    return run_decode(decode_attention, case, q.float(), kv.float(), tables)


def dtypes(cases):
    """As they are; on a GPU in bfloat16 too, which the interpreter multiplies wrongly."""
    return cases if INTERPRETED else [*cases, *(with_dtype(case, torch.bfloat16) for case in cases)]


@pytest.mark.parametrize("case", dtypes([*PREFILL_CASES, *OTHER]), ids=str)
def test_prefill_equals_the_reference(case):
    actual = run_prefill(TritonPrefill(), case, *pool_of(case, DEVICE))
    assert_close(actual.cpu(), expected_prefill(case), case.dtype)


@pytest.mark.parametrize("case", dtypes([*DECODE_CASES, *OTHER]), ids=str)
def test_decode_equals_the_reference(case):
    case = with_dtype(case, case.dtype, queries=[1] * len(case.contexts))
    actual = run_decode(TritonDecode(), case, *pool_of(case, DEVICE))
    assert_close(actual.cpu(), expected_decode(case), case.dtype)


@pytest.mark.parametrize("keys", [16, 64, 128])
def test_the_size_of_a_tile_changes_no_result(keys):
    case = Case(contexts=[150, 40], queries=[30, 40], group=3, kv_heads=1, block_size=32)
    book = TileBook(only=Tiles(rows=64, keys=keys, warps=4, stages=2))
    assert_close(
        run_prefill(TritonPrefill(book), case, *pool_of(case, DEVICE)).cpu(), expected_prefill(case), case.dtype
    )
    case = with_dtype(case, case.dtype, queries=[1, 1])
    assert_close(run_decode(TritonDecode(book), case, *pool_of(case, DEVICE)).cpu(), expected_decode(case), case.dtype)


def test_a_chunk_of_one_token_equals_the_same_token_decoded():
    case = Case(contexts=[77, 130], queries=[1, 1])
    pool = pool_of(case, DEVICE)
    assert_close(run_prefill(TritonPrefill(), case, *pool), run_decode(TritonDecode(), case, *pool), case.dtype)


def test_queries_may_be_a_view_of_a_wider_tensor():
    case = Case(contexts=[33, 20], queries=[5, 20])
    q, kv, tables = pool_of(case, DEVICE)
    wider = torch.full((q.shape[0], 2 * q.shape[1], q.shape[2]), float("nan"), device=DEVICE)
    wider[:, : q.shape[1]] = q
    out = torch.empty_like(q)
    TritonPrefill()(wider[:, : q.shape[1]], kv, prefill_batch(case, tables), case.dim**-0.5, out)
    assert_close(out.cpu(), expected_prefill(case), case.dtype)


def test_scores_far_apart_do_not_overflow():
    case = Case(contexts=[200], queries=[20], kv_heads=1)
    q, kv, tables = pool_of(case)
    expected = run_prefill(prefill_attention, case, q * 1e4, kv, tables)
    q, kv, tables = pool_of(case, DEVICE)
    assert_close(run_prefill(TritonPrefill(), case, q * 1e4, kv, tables).cpu(), expected, case.dtype)


def test_a_row_without_context_pads_a_decode_batch_and_gets_zeros():
    case = Case(contexts=[40, 300], queries=[1, 1])
    q, kv, tables = pool_of(case, DEVICE)
    kernel = TritonDecode()

    def empty_first(q, kv, batch, scale, out):
        batch.context_lens[0] = 0
        kernel(q, kv, batch, scale, out)

    actual = run_decode(empty_first, case, q, kv, tables).cpu()
    assert torch.equal(actual[0], torch.zeros_like(actual[0]))
    assert_close(actual[1], expected_decode(case)[1], case.dtype)


def test_block_ids_beyond_two_to_the_31_elements_are_addressed_right():
    num_blocks, heads, block_size, dim = 70_000, 2, 16, 64  # 2.3e9 elements, virtual until touched
    torch.use_deterministic_algorithms(False)
    kv = torch.empty((num_blocks, 8, 2, heads, block_size, dim), dtype=torch.float16, device=DEVICE)[:, 7]
    kv[-1] = torch.randn(2, heads, block_size, dim)
    case = Case(contexts=[16], queries=[1], group=1, dtype=torch.float16)
    q, tables = torch.randn(1, heads, dim).half().to(DEVICE), torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    expected = run_decode(decode_attention, case, q.float().cpu(), kv[-1:].float().cpu(), torch.zeros_like(tables))
    for kernel, run in ((TritonDecode(), run_decode), (TritonPrefill(), run_prefill)):
        assert_close(run(kernel, case, q, kv, tables.to(DEVICE)).cpu(), expected, case.dtype)


def test_a_work_list_holds_every_query_token_once_and_the_longest_tiles_first():
    case = Case(contexts=[5, 900, 40, 64, 7], queries=[5, 100, 0, 33, 1])
    q, _, tables = pool_of(with_dtype(case, torch.float32, dim=16))
    items = work_list(prefill_batch(case, tables), q.shape[0], tokens=16).tolist()
    used = [(request, first) for request, first in items if request >= 0]
    assert sorted(used) == [(r, first) for r, n in enumerate(case.queries) for first in range(0, n, 16)]
    assert all(request < 0 for request, _ in items[len(used) :])
    reach = [case.contexts[r] - case.queries[r] + first for r, first in used]
    assert reach == sorted(reach, reverse=True)


def test_a_kernel_given_a_new_batch_makes_a_new_work_list():
    kernel = TritonPrefill()
    for case in (Case(contexts=[33], queries=[33]), Case(contexts=[20, 13], queries=[20, 13])):
        assert_close(run_prefill(kernel, case, *pool_of(case, DEVICE)).cpu(), expected_prefill(case), case.dtype)


def fitted(queries, context, group=4):
    """Rows per tile and splits for chunks of `queries` tokens on a device of 132 multiprocessors, 8 KV heads."""
    heads = Heads(kv_heads=8, group=group, head_dim=128, padded_dim=128, block_size=16)
    case = Case(contexts=[max(context, n) for n in queries], queries=queries)
    batch = prefill_batch(case, torch.zeros(len(queries), 1, dtype=torch.int32))
    tiles = table_tiles("prefill", (9, 0), torch.bfloat16, 128)
    tiles, splits = fit(tiles, heads, sum(queries), batch, num_multiprocessors=132)
    return tiles.rows, splits


def test_tiles_shrink_for_short_chunks_and_for_few_tiles():
    assert fitted([8192], context=8192) == (128, 1)
    assert fitted([300], context=300) == (64, 1)
    assert fitted([40], context=40) == (16, 1)
    assert fitted([4] * 1000, context=8192) == (16, 1)


def test_a_short_chunk_over_a_long_prefix_is_split_to_fill_the_device():
    assert fitted([100], context=32768) == (64, 5)  # 7 tiles of 8 heads
    assert fitted([1], context=131072) == (16, 33)


def test_a_tile_holds_at_least_one_token_of_the_largest_group():
    assert fitted([8], context=8, group=71)[0] == 128


def test_splits_fill_the_device_and_stay_the_same_while_a_graph_serves():
    assert num_splits(8, 131072, keys=64, num_multiprocessors=132) == 33
    assert num_splits(4096, 2048, keys=64, num_multiprocessors=132) == 1
    assert num_splits(4096, 131072, keys=64, num_multiprocessors=132) == 131072 // LONGEST_SHARE
    assert num_splits(1, 131072, keys=64, num_multiprocessors=1000) == MOST_SPLITS
    assert num_splits(1, 100, keys=64, num_multiprocessors=132) == 1
    assert len({num_splits(8, context, keys=64, num_multiprocessors=132) for context in range(1025, 2049)}) == 1


@pytest.mark.parametrize("run, kernel", [(run_prefill, TritonPrefill), (run_decode, TritonDecode)])
def test_what_a_kernel_cannot_do_is_refused_by_shape(run, kernel):
    case = Case(contexts=[4], queries=[1])
    q, kv, tables = pool_of(case, DEVICE)
    with pytest.raises(ValueError, match="bfloat16"):
        run(kernel(), case, q, kv.to(torch.bfloat16), tables)
    with pytest.raises(ValueError, match=r"\(1, 5, 64\)"):
        run(kernel(), case, q[:, :5].contiguous(), kv, tables)
    with pytest.raises(ValueError, match="float64"):
        run(kernel(), case, q.double(), kv.double(), tables)
    with pytest.raises(ValueError, match="int32"):
        run(kernel(), case, q, kv, tables.long())
    with pytest.raises(ValueError, match="258"):
        run(kernel(), case, q[:, :1].expand(-1, 258, -1), kv, tables)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU multiplies bfloat16 right")
def test_bfloat16_is_refused_under_the_interpreter():
    case = Case(contexts=[4], queries=[1], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="interpreter"):
        run_decode(TritonDecode(), case, *pool_of(case))


def test_a_tuned_file_serves_its_own_device_dtype_and_head_size_only(tmp_path):
    device, half = torch.device(DEVICE), torch.float16
    save(tmp_path, device, half, 128, {"decode": SMALL})
    book = TileBook(tmp_path)
    assert book.tiles("decode", device, half, 128) == SMALL
    others = [("prefill", half, 128), ("decode", torch.float32, 128), ("decode", half, 64)]
    assert all(book.tiles(p, device, d, h) == TileBook().tiles(p, device, d, h) for p, d, h in others)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"decode": {"rows": 17, "keys": 16, "warps": 4, "stages": 2}}', '{"decode": {"keys": 16}}']
)
def test_a_tuned_file_that_makes_no_sense_is_as_good_as_none(tmp_path, text):
    path = tuned_path(tmp_path, torch.device(DEVICE), torch.float16, 64)
    path.write_text(text)
    assert load(tmp_path, torch.device(DEVICE), torch.float16, 64) == {}


def test_tuning_keeps_the_fastest_tiles_and_passes_over_what_cannot_run(tmp_path):
    problem = tune.Problem(
        device=torch.device(DEVICE), dtype=torch.float32, q_heads=2, kv_heads=1, head_dim=16, block_size=16,
        sequences=2, context=64,
    )  # fmt: skip
    answers = iter([3.0, None, 1.0] * 2)  # None: does not fit this device

    def measure(call):
        call()
        answer = next(answers)
        if answer is None:
            raise RuntimeError("out of shared memory")
        return answer

    tries = [Tiles(rows=16, keys=keys, warps=4, stages=2) for keys in (16, 32, 64)]
    best = tune.tune(problem, tmp_path, tries={"prefill": tries, "decode": tries}, measure=measure)
    assert best == {"prefill": tries[2], "decode": tries[2]}
    assert load(tmp_path, problem.device, problem.dtype, 16) == best


def test_every_candidate_is_sound():
    assert all(tiles.is_sound() for phase in ("prefill", "decode") for tiles in tune.candidates(phase))
