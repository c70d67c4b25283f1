"""Norms, rotation with the cache write, the SiLU gate and linear layers: native against the reference in float32."""

import platform

import pytest
import torch

from pd_kernels.cpu.arena import Arena
from pd_kernels.cpu.build import Toolchain
from pd_kernels.cpu.layer import CpuLayer
from pd_kernels.cpu.library import load
from pd_kernels.cpu.linear import RowLinear, TileLinear, pack
from pd_kernels.int8 import quantize, quantized_bytes
from pd_kernels.reference import ReferenceLayer

ARCHES = ["native", "x86-64-v3"] if platform.machine() == "x86_64" else ["native"]
DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = ReferenceLayer()

each = pytest.mark.parametrize
everywhere = [each("arch", ARCHES), each("dtype", DTYPES, ids=str)]


def on_every_target(test):
    for mark in everywhere:
        test = mark(test)
    return test


def layer_for(dtype, arch="native"):
    return CpuLayer(load(Toolchain(arch=arch)), dtype)


def rand(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual, expected, dtype, scale=1.0):
    tolerance = (2e-6 if dtype is torch.float32 else 1e-2) * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@each("hidden", [16, 64, 100, 576])
@on_every_target
def test_rms_norm_equals_the_reference(hidden, dtype, arch):
    x, weight = rand(5, hidden, dtype=dtype), rand(hidden, dtype=dtype, seed=1)
    expected = REFERENCE.rms_norm(x.float(), weight.float(), 1e-5)
    assert_close(layer_for(dtype, arch).rms_norm(x, weight, 1e-5), expected, dtype)


@each("hidden", [64, 100])
@on_every_target
def test_add_rms_norm_adds_into_the_residual_and_normalises_the_sum(hidden, dtype, arch):
    x, residual = (rand(5, hidden, dtype=dtype, seed=s) for s in (0, 1))
    weight = rand(hidden, dtype=dtype, seed=2)
    theirs = residual.clone()
    expected = REFERENCE.add_rms_norm(x, theirs, weight, 1e-5)
    actual = layer_for(dtype, arch).add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, theirs)
    assert_close(actual, expected, dtype)


@each("inner", [8, 48, 100])
@on_every_target
def test_silu_mul_equals_the_reference(inner, dtype, arch):
    gate_up = rand(7, 2 * inner, dtype=dtype) * 4
    gate_up[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
    assert_close(layer_for(dtype, arch).silu_mul(gate_up), REFERENCE.silu_mul(gate_up.float()), dtype, scale=4)


@each("normed", [False, True])
@each("dim", [16, 64, 80, 128])
@on_every_target
def test_rope_write_rotates_and_fills_exactly_its_slots(dim, normed, dtype, arch):
    tokens, q_heads, kv_heads, block_size = 6, 6, 2, 4
    qkv, angles = rand(tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype), rand(tokens, dim // 2, seed=1)
    rope = torch.stack([angles.cos(), angles.sin()], dim=1)
    slots = torch.tensor([5, 6, 7, 16, 17, 0])
    norms = (rand(dim, dtype=dtype, seed=2), rand(dim, dtype=dtype, seed=3), 1e-6) if normed else None
    mine, theirs = (torch.full((5, 3, 2, kv_heads, block_size, dim), 7.0, dtype=dtype) for _ in range(2))
    expected = REFERENCE.rope_write(qkv, rope, slots, theirs[:, 1], norms)
    actual = layer_for(dtype, arch).rope_write(qkv, rope, slots, mine[:, 1], norms)
    assert actual.shape == (tokens, q_heads, dim)
    assert_close(actual, expected, dtype)
    assert_close(mine, theirs, dtype)
    assert torch.equal(mine[:, 1, 1], theirs[:, 1, 1])  # values are copied, not computed
    assert torch.equal(mine == 7.0, theirs == 7.0)


@each("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 70])
@on_every_target
def test_linear_of_few_and_many_rows_equals_torch(rows, dtype, arch):
    x, weight, bias = rand(rows, 96, dtype=dtype), rand(200, 96, dtype=dtype, seed=1), rand(200, dtype=dtype, seed=2)
    linear = layer_for(dtype, arch).pack_linear(weight, bias)
    expected = x.double() @ weight.double().T + bias.double()
    assert linear(x).dtype is dtype
    assert_close(linear(x), expected, dtype, scale=8)


@each("shape", [(1, 32), (16, 32), (17, 64), (64, 576), (65, 100), (130, 1536)], ids=str)
@on_every_target
def test_linear_takes_any_number_of_features(shape, dtype, arch):
    x, weight = rand(3, shape[1], dtype=dtype), rand(*shape, dtype=dtype, seed=1) / shape[1] ** 0.5
    actual = layer_for(dtype, arch).pack_linear(weight, None)(x)
    assert_close(actual, x.double() @ weight.double().T, dtype, scale=4)


@each("rows", [1, 20, 100])
@on_every_target
def test_a_linear_packed_for_float32_output_does_not_round_its_sums(rows, dtype, arch):
    x, weight = rand(rows, 64, dtype=dtype), rand(48, 64, dtype=dtype, seed=1)
    actual = layer_for(dtype, arch).pack_linear(weight, None, float32_out=True)(x)
    assert actual.dtype is torch.float32
    rounded = rows == 100 and not isinstance(layer_for(dtype, arch).pack_linear(weight, None), TileLinear)
    assert_close(actual, x.double() @ weight.double().T, dtype if rounded else torch.float32, scale=8)


def test_a_packed_linear_outlives_the_weight_it_was_made_from():
    weight, x = rand(64, 64), rand(2, 64, seed=1)
    linear = layer_for(torch.float32).pack_linear(weight, None)
    expected = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), expected)


def test_two_threads_give_the_same_linear_as_one():
    x, linear = (
        rand(40, 64, dtype=torch.bfloat16),
        layer_for(torch.bfloat16).pack_linear(rand(300, 64, dtype=torch.bfloat16, seed=1), None),
    )
    single, before = linear(x), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x), single)
    finally:
        torch.set_num_threads(before)


def test_a_linear_refuses_rows_of_the_wrong_width():
    linear = layer_for(torch.bfloat16).pack_linear(rand(64, 64, dtype=torch.bfloat16), None)
    with pytest.raises(ValueError, match=r"\(2, 32\)"):
        linear(rand(2, 32, dtype=torch.bfloat16))


def test_kernels_selected_for_one_dtype_refuse_another():
    with pytest.raises(ValueError, match="float32"):
        layer_for(torch.bfloat16).rms_norm(rand(2, 64), rand(64), 1e-5)


def test_float32_weights_stay_row_major_and_are_kept_once():
    assert isinstance(pack(load(Toolchain()), Arena(), rand(64, 64), None, False), RowLinear)


def test_tensors_of_an_arena_are_aligned_and_apart():
    arena = Arena(chunk_bytes=1 << 20)
    a, b, large = (arena.empty((n,), torch.bfloat16) for n in (100, 50, 1 << 20))
    a.fill_(1), b.fill_(2), large.fill_(3)
    assert all(x.data_ptr() % 64 == 0 for x in (a, b, large))
    assert (a.unique().item(), b.unique().item(), large.unique().item()) == (1, 2, 3)


@each("rows", [1, 2, 3, 4, 5, 16, 17, 31, 32, 33, 48, 49, 64, 70, 290])
@on_every_target
def test_an_int8_linear_of_any_number_of_rows_equals_the_reference(rows, dtype, arch):
    x, weight, bias = rand(rows, 96, dtype=dtype), rand(200, 96, dtype=dtype, seed=1), rand(200, dtype=dtype, seed=2)
    linear = layer_for(dtype, arch).pack_linear(weight, bias, int8=True)
    expected = REFERENCE.pack_linear(weight.float(), bias.float(), int8=True)(x.float())
    assert linear(x).dtype is dtype
    assert_close(linear(x), expected, dtype, scale=8)


@each("shape", [(1, 32), (16, 32), (17, 64), (64, 576), (65, 100), (130, 1536)], ids=str)
@each("rows", [3, 40])
@on_every_target
def test_an_int8_linear_takes_any_number_of_features(rows, shape, dtype, arch):
    x, weight = rand(rows, shape[1], dtype=dtype), rand(*shape, dtype=dtype, seed=1) / shape[1] ** 0.5
    weight[0] = 0
    actual = layer_for(dtype, arch).pack_linear(weight, None, int8=True, float32_out=True)(x)
    assert actual.dtype is torch.float32
    assert (actual[:, 0] == 0).all()
    assert_close(actual, REFERENCE.pack_linear(weight.float(), None, int8=True)(x.float()), torch.float32, scale=8)


@on_every_target
def test_a_row_of_an_int8_linear_does_not_depend_on_the_rows_beside_it(dtype, arch):
    x = rand(300, 576, dtype=dtype)
    linear = layer_for(dtype, arch).pack_linear(rand(100, 576, dtype=dtype, seed=1), None, int8=True, float32_out=True)
    together = linear(x)
    for rows in (1, 2, 3, 16, 20, 33):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])


def test_int8_weights_round_to_nearest_even_with_one_scale_per_channel():
    integers, scale = quantize(torch.tensor([[127.0, 2.5, -3.5, 0.4], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 5.0]]))
    assert scale.tolist() == [1.0, 0.0, 2.0]
    assert integers.tolist() == [[127, 2, -4, 0], [0, 0, 0, 0], [-127, 0, 2, 2]]


def test_an_int8_linear_stays_within_half_a_step_of_its_weights():
    weight = rand(50, 64)
    linear = layer_for(torch.float32).pack_linear(weight, None, int8=True)
    kept = linear(torch.eye(64)).T
    assert ((kept - weight).abs() <= 0.501 * weight.abs().amax(1, keepdim=True) / 127).all()
    assert quantized_bytes(*weight.shape) == 50 * 64 + 4 * 50


def test_two_threads_give_the_same_int8_linear_as_one():
    weight = rand(300, 64, dtype=torch.bfloat16, seed=1)
    linear, before = layer_for(torch.bfloat16).pack_linear(weight, None, int8=True), torch.get_num_threads()
    for rows in (3, 40):
        x = rand(rows, 64, dtype=torch.bfloat16)
        torch.set_num_threads(1)
        single = linear(x)
        torch.set_num_threads(2)
        try:
            assert torch.equal(linear(x), single)
        finally:
            torch.set_num_threads(before)


@each("int8", [False, True])
@on_every_target
def test_no_rows_are_no_work(int8, dtype, arch):
    linear = layer_for(dtype, arch).pack_linear(rand(48, 64, dtype=dtype), None, int8=int8)
    assert linear(rand(0, 64, dtype=dtype)).shape == (0, 48)
