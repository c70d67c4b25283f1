"""Triton's norms, rotation with the cache write, SiLU gate and linear layers against the reference."""

import pytest
import torch

from pd_kernels.reference import ReferenceLayer
from pd_kernels.triton.layer import MAX_HIDDEN, TritonLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Off a GPU bfloat16 results are cut, not rounded, by Triton's interpreter: one unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
REFERENCE, LAYER = ReferenceLayer(), TritonLayer()
NAN = float("nan")

each = pytest.mark.parametrize
of_every_dtype = each("dtype", DTYPES, ids=str)


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def bits(x):
    return x.contiguous().view(torch.uint8)


def assert_close(actual, expected, dtype, scale=1.0):
    tolerance = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@each("rows", [1, 3, 17])
@each("hidden", [64, 100, 576, 960, 4096])
@of_every_dtype
def test_rms_norm_equals_the_reference(hidden, rows, dtype):
    x, weight = rand(rows, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    actual = LAYER.rms_norm(x, weight, 1e-5)
    assert actual.dtype is dtype
    assert_close(actual, REFERENCE.rms_norm(x.float(), weight.float(), 1e-5), dtype)


@each("rows", [1, 3, 17])
@each("hidden", [100, 576, 960])
@of_every_dtype
def test_add_rms_norm_adds_into_the_residual_and_normalises_the_rounded_sum(hidden, rows, dtype):
    x, residual = (rand(rows, hidden, dtype=dtype, seed=s) for s in (0, 1))
    weight, theirs, before = rand(hidden, dtype=dtype, seed=2), residual.clone(), x.clone()
    expected = REFERENCE.add_rms_norm(x, theirs, weight, 1e-5)
    actual = LAYER.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, before)
    assert_close(actual, expected, dtype, scale=2)
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        assert_close(residual, theirs, dtype)
    else:
        assert torch.equal(residual, theirs)


def test_norms_read_rows_that_are_not_adjacent():
    wide, weight = rand(5, 300), rand(100, seed=1)
    x, residual = wide[:, 100:200], wide[:, 200:]
    expected = REFERENCE.rms_norm(x + residual, weight, 1e-5)
    edges = wide[:, :200].clone()
    assert_close(LAYER.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), torch.float32)
    assert_close(LAYER.add_rms_norm(x, residual, weight, 1e-5), expected, torch.float32)
    assert torch.equal(wide[:, :200], edges)


@each("rows", [1, 3, 17])
@each("inner", [8, 100, 1536])
@of_every_dtype
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # NumPy's remark on exp(100) = inf, as it should be
def test_silu_mul_equals_the_reference(inner, rows, dtype):
    gate_up = rand(rows, 2 * inner, dtype=dtype) * 4
    gate_up[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
    assert_close(LAYER.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.float()), dtype, scale=4)


def rope_case(tokens, group, dim, dtype, *, kv_heads=2):
    qkv, angles = rand(tokens, (group + 2) * kv_heads * dim, dtype=dtype), rand(tokens, dim // 2, seed=1)
    rope = torch.stack([angles.cos(), angles.sin()], dim=1)
    norms = (rand(dim, dtype=dtype, seed=2), rand(dim, dtype=dtype, seed=3), 1e-6)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(4))[:tokens].to(DEVICE)
    pools = [torch.full((10, 3, 2, kv_heads, 4, dim), NAN, dtype=dtype, device=DEVICE) for _ in range(2)]
    return qkv, rope, order, norms, pools


ROPE_SHAPES = [
    *((3, group, 64) for group in (1, 3, 4, 7, 8)),
    *((3, 2, dim) for dim in (16, 80, 96, 128, 256)),
    *((rows, 3, 64) for rows in (1, 17)),
]


@each("normed", [False, True])
@each("shape", ROPE_SHAPES, ids=str)
@of_every_dtype
def test_rope_write_rotates_and_fills_exactly_its_slots(shape, normed, dtype):
    qkv, rope, slots, norms, (mine, theirs) = rope_case(*shape, dtype)
    norms = norms if normed else None
    expected = REFERENCE.rope_write(qkv, rope, slots, theirs[:, 1], norms)
    actual = LAYER.rope_write(qkv, rope, slots, mine[:, 1], norms)
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert_close(actual, expected, dtype, scale=4)
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert_close(mine.nan_to_num(), theirs.nan_to_num(), dtype, scale=4)
    assert torch.equal(bits(mine[:, 1, 1]), bits(theirs[:, 1, 1]))  # values are copied, not computed
    assert torch.equal(bits(mine[:, ::2]), bits(theirs[:, ::2]))  # other layers are untouched


@of_every_dtype
def test_a_negative_slot_writes_nothing_and_its_query_is_still_returned(dtype):
    qkv, rope, slots, norms, (mine, theirs) = rope_case(5, 3, 80, dtype)
    slots[[1, 4]] = torch.tensor([-1, -7], device=DEVICE)
    real = slots >= 0
    REFERENCE.rope_write(qkv[real], rope[real], slots[real], theirs[:, 1], norms)
    untouched = theirs.isnan()
    before = bits(mine).view(mine.dtype).view(mine.shape).clone()
    actual = LAYER.rope_write(qkv, rope, slots, mine[:, 1], norms)
    assert actual.isfinite().all()
    assert torch.equal(mine.isnan(), untouched)
    assert torch.equal(bits(mine[untouched]), bits(before[untouched]))


def test_rope_write_goes_through_any_strides():
    qkv, rope, slots, norms, (mine, theirs) = rope_case(7, 3, 64, torch.float32)
    twisted = mine[:, 1].permute(4, 3, 1, 0, 2).contiguous().permute(3, 2, 4, 1, 0)
    wide = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]]
    expected = REFERENCE.rope_write(qkv, rope, slots, theirs[:, 1], norms)
    assert_close(LAYER.rope_write(wide, rope, slots, twisted, norms), expected, torch.float32)
    torch.testing.assert_close(twisted, theirs[:, 1], rtol=2e-6, atol=2e-6, equal_nan=True)


def test_slots_beyond_two_to_the_31_elements_are_addressed_right():
    num_blocks, heads, block_size, dim = 70_000, 2, 16, 64  # 2.3e9 elements, virtual until touched
    pool = torch.empty((num_blocks, 8, 2, heads, block_size, dim), dtype=torch.float16, device=DEVICE)
    qkv, rope, _, norms, (_, theirs) = rope_case(1, 1, dim, torch.float16)
    small = torch.zeros((1, 2, heads, block_size, dim), dtype=torch.float16, device=DEVICE)
    pool[-1, 7] = small[0]
    REFERENCE.rope_write(qkv, rope, torch.tensor([5], device=DEVICE), small, norms)
    slot = torch.tensor([(num_blocks - 1) * block_size + 5], device=DEVICE)
    LAYER.rope_write(qkv, rope, slot, pool[:, 7], norms)
    assert pool.numel() > 2**31
    assert_close(pool[-1, 7], small[0], torch.float16)


def test_no_rows_give_no_rows():
    qkv, rope, slots, _, (mine, _) = rope_case(0, 3, 64, torch.float32)
    assert LAYER.rms_norm(rand(0, 64), rand(64), 1e-5).shape == (0, 64)
    assert LAYER.silu_mul(rand(0, 64)).shape == (0, 32)
    assert LAYER.rope_write(qkv, rope, slots, mine[:, 1], None).shape == (0, 6, 64)


@each("with_bias", [False, True])
@of_every_dtype
def test_linear_equals_torch_and_may_leave_in_float32(dtype, with_bias):
    x, weight, bias = (rand(*shape, dtype=dtype) for shape in ((3, 96), (40, 96), (40,)))
    bias = bias if with_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain, wide = (LAYER.pack_linear(weight, bias, float32_out=wanted)(x) for wanted in (False, True))
    assert (plain.dtype, wide.dtype) == (dtype, torch.float32)
    assert_close(plain, expected, dtype, scale=16)
    assert_close(wide, expected, dtype, scale=16)


def test_what_a_kernel_cannot_do_is_refused_by_shape():
    qkv, rope, slots, _, (mine, _) = rope_case(3, 3, 64, torch.float32)
    with pytest.raises(ValueError, match=rf"\(1, {MAX_HIDDEN + 1}\)"):
        LAYER.rms_norm(rand(1, MAX_HIDDEN + 1), rand(MAX_HIDDEN + 1), 1e-5)
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        LAYER.silu_mul(rand(3, 5))
    with pytest.raises(ValueError, match=r"\(3, 639\)"):
        LAYER.rope_write(qkv[:, :-1], rope, slots, mine[:, 1], None)
    with pytest.raises(ValueError, match="int64"):
        LAYER.rope_write(qkv, rope, slots.int(), mine[:, 1], None)
    with pytest.raises(ValueError, match="float16"):
        LAYER.rope_write(qkv, rope, slots, mine[:, 1].half(), None)
    with pytest.raises(ValueError, match=r"\(3, 64\).*\(2, 64\)"):
        LAYER.add_rms_norm(rand(3, 64), rand(2, 64), rand(64), 1e-5)
