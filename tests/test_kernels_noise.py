"""Gumbel noise: known answers, the same bits natively and in torch, and the distribution it should have."""

import math
import platform

import numpy as np
import pytest
import torch

from pd_kernels import noise
from pd_kernels.cpu.build import Toolchain
from pd_kernels.cpu.layer import CpuSampling
from pd_kernels.cpu.library import load

ARCHES = ["native", "x86-64-v3"] if platform.machine() == "x86_64" else ["native"]
FULL = 0xFFFFFFFF

# Philox4x32-10 known answers of Salmon et al. (2011): counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def native(arch="native"):
    return CpuSampling(load(Toolchain(arch=arch)))


def bits(x):
    return x.view(torch.int32)


def scalar_gumbel_bits(seed, position, token):
    """The docstring's algorithm once more, in Python integers and numpy float32 scalars."""
    c, k = [token, 0, position & FULL, position >> 32], [seed & FULL, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & FULL, (p0 >> 32) ^ c[3] ^ k[1], p0 & FULL]
        k = [(k[0] + 0x9E3779B9) & FULL, (k[1] + 0xBB67AE85) & FULL]
    f = np.float32

    def log(x):
        e = (int(x.view(np.int32)) >> 23) - 127
        m = f(x / f(2.0**e))
        m, e = (f(m * f(0.5)), e + 1) if m > f(1.41421354) else (m, e)
        s = f(f(m - f(1)) / f(m + f(1)))
        z, p = f(s * s), f(2 / 9)
        for term in (2 / 7, 2 / 5, 2 / 3, 2):
            p = f(f(z * p) + f(term))
        return f(f(f(e) * f(0.693359375)) + f(f(f(e) * f(-2.12194440e-4)) + f(s * p)))

    u = f(f(f(c[0] >> 9) + f(0.5)) * f(2.0**-23))
    return int((-log(-log(u))).view(np.int32))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter, key, answer):
    words = noise.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(w.item() for w in words) == answer


VECTORS = [
    # seed, position, token id, bits of the noise
    (0x0, 0x0, 0, 0x3DADB648),
    (0x0, 0x0, 1, 0x40647D82),
    (0x1, 0x0, 49151, 0x3F1F8D51),
    (0x2A, 0x7, 1234, 0x3F7A76EC),
    (0x8000000000000005, 0x200000001, 128255, 0xBE12087C),
    (0xFFFFFFFFFFFFFFFF, 0x100000000, 0, 0xBEBA5485),
    (0xDEADBEEF, 0x1FF, 2147483655, 0xBD5FDC84),
]


@pytest.mark.parametrize(("seed", "position", "token", "expected"), VECTORS)
def test_noise_has_the_written_bits(seed, position, token, expected):
    ids = torch.tensor([token])
    assert bits(noise.gumbel(seed, position, ids)).item() & FULL == expected
    assert bits(native().gumbel(seed, position, ids, 0)).item() & FULL == expected
    assert scalar_gumbel_bits(seed, position, token) & FULL == expected


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (2**64 - 1, 2**40 + 3), (123456789012345, 2047)])
def test_native_noise_has_the_same_bits_as_torch(seed, position, arch):
    expected = noise.gumbel(seed, position, torch.arange(49152))
    assert torch.equal(bits(native(arch).gumbel(seed, position, None, 49152)), bits(expected))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
def test_the_value_of_an_id_does_not_depend_on_what_else_is_drawn(count):
    ids = torch.randperm(49152, generator=torch.Generator().manual_seed(0))[:count]
    whole = native().gumbel(5, 9, None, 49152)
    assert torch.equal(native().gumbel(5, 9, ids, 49152), whole[ids])


def test_the_logarithm_is_accurate_to_two_units_in_the_last_place():
    x = torch.cat([torch.logspace(-7, 1.3, 20001), 1 - torch.arange(1, 3000) * 2.0**-24]).float()
    exact = x.double().log()
    assert ((noise.log_float32(x).double() - exact).abs() <= 2.4e-7 * exact.abs()).all()


def test_noise_is_finite_at_both_ends_of_the_uniform():
    u = torch.tensor([2.0**-24, 1 - 2.0**-24])
    g = -noise.log_float32(-noise.log_float32(u))
    assert g.tolist() == pytest.approx([-math.log(24 * math.log(2)), 24 * math.log(2)], rel=1e-6)


def test_noise_is_gumbel_distributed():
    x = torch.cat([noise.gumbel(11, position, torch.arange(20000)) for position in range(10)]).double()
    assert x.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert x.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_seeds_and_positions_give_different_noise():
    ids = torch.arange(1000)
    draws = [noise.gumbel(seed, position, ids) for seed in (0, 1, 2**32) for position in (0, 1, 2**32)]
    assert len({tuple(d.tolist()) for d in draws}) == 9
