"""Gumbel noise: the algorithm, written out once, and its torch implementation.

Owns the definition that every other implementation (native C++, GPU) repeats bit for bit; owns no sampling rule.
Invariant: the noise of (seed, position, token id) depends on nothing else, on no device and on no other id.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), all arithmetic modulo 2^32:

    key     = (seed mod 2^32, seed div 2^32)
    counter = (token id, 0, position mod 2^32, position div 2^32)
    ten times:  (h0, l0) = 0xD2511F53 * counter[0],  (h1, l1) = 0xCD9E8D57 * counter[2]   (high and low 32 bits)
                counter  = (h1 ^ counter[1] ^ key[0], l1, h0 ^ counter[3] ^ key[1], l0)
                key      = (key[0] + 0x9E3779B9, key[1] + 0xBB67AE85)
    word    = counter[0]

From here on every operation is one IEEE float32 operation, rounded to nearest even, none fused with another:

    u = ((word >> 9) + 0.5) * 2^-23                       exact, 2^-24 <= u <= 1 - 2^-24
    g = -log(-log(u))

    log(x), x positive and normal: x = m * 2^e with 1 <= m < 2; if m > 1.41421354 then m = m * 0.5 and e = e + 1
        s = (m - 1) / (m + 1),  z = s * s
        p = ((((2/9) * z + 2/7) * z + 2/5) * z + 2/3) * z + 2     the series of log((1 + s) / (1 - s)) / s
        log(x) = e * 0.693359375 + (e * -2.12194440e-4 + s * p)   the two constants sum to ln 2
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wrap around in int64: the 64 bits are still right
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def log_float32(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float32 values by the steps of the module's docstring."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127
    m = ((bits & 0x007FFFFF) | 0x3F800000).view(torch.float32)
    big = m > 1.41421354
    exponent = exponent + big.to(torch.int32)
    m = torch.where(big, m * 0.5, m)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (2.0 / 9.0) + (2.0 / 7.0)
    p = z * p + (2.0 / 5.0)
    p = z * p + (2.0 / 3.0)
    p = z * p + 2.0
    e = exponent.to(torch.float32)
    small = e * -2.12194440e-4 + s * p
    return e * 0.693359375 + small


def gumbel(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Float32 noise for int64 `token_ids`, on their device."""
    zero = torch.zeros_like(token_ids)
    counter = (token_ids & _LOW, zero, zero + (position & _LOW), zero + ((position >> 32) & _LOW))
    word = philox(counter, (seed & _LOW, (seed >> 32) & _LOW))[0]
    u = ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -log_float32(-log_float32(u))
