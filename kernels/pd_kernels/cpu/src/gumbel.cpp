// Gumbel noise, bit for bit as written in pd_kernels/noise.py. Compiled with -ffp-contract=off: no multiply-add may fuse.
#include "simd.h"

namespace pd {
namespace {

inline void multiply(uint32_t factor, u32x16 c, u32x16& high, u32x16& low) {
#if defined(__AVX512F__)
    __m512i value = reinterpret_cast<__m512i>(c), m = _mm512_set1_epi64(factor);
    __m512i even = _mm512_mul_epu32(value, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(value, 32), m);
    high = reinterpret_cast<u32x16>(_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd));
    low = reinterpret_cast<u32x16>(_mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32)));
#else
    for (int i = 0; i < LANES; ++i) {
        uint64_t product = static_cast<uint64_t>(factor) * c[i];
        high[i] = static_cast<uint32_t>(product >> 32);
        low[i] = static_cast<uint32_t>(product);
    }
#endif
}

inline u32x16 philox_word(u32x16 token, uint64_t seed, uint64_t position) {
    u32x16 zero = {};
    u32x16 c0 = token, c1 = zero, c2 = zero + static_cast<uint32_t>(position), c3 = zero + static_cast<uint32_t>(position >> 32);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        u32x16 high0, low0, high1, low1;
        multiply(0xd2511f53u, c0, high0, low0);
        multiply(0xcd9e8d57u, c2, high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c0;
}

inline f32x16 log_f32(f32x16 x) {
    i32x16 bits = reinterpret_cast<i32x16>(x);
    i32x16 exponent = (bits >> 23) - 127;
    f32x16 m = reinterpret_cast<f32x16>((bits & 0x007fffff) | 0x3f800000);
    i32x16 big = m > 1.41421354f;  // -1 where true
    exponent -= big;
    m = big ? m * 0.5f : m;
    f32x16 s = (m - 1.0f) / (m + 1.0f);
    f32x16 z = s * s;
    f32x16 p = z * float(2.0 / 9.0) + float(2.0 / 7.0);
    p = z * p + float(2.0 / 5.0);
    p = z * p + float(2.0 / 3.0);
    p = z * p + 2.0f;
    f32x16 e = __builtin_convertvector(exponent, f32x16);
    f32x16 small = e * -2.12194440e-4f + s * p;
    return e * 0.693359375f + small;
}

inline f32x16 gumbel(u32x16 token, uint64_t seed, uint64_t position) {
    f32x16 u = __builtin_convertvector(reinterpret_cast<i32x16>(philox_word(token, seed, position) >> 9), f32x16);
    u = (u + 0.5f) * 0x1p-23f;
    return -log_f32(-log_f32(u));
}

}  // namespace
}  // namespace pd

// ids may be null: tokens 0 .. count - 1.
extern "C" void pd_gumbel(uint64_t seed, uint64_t position, const int64_t* ids, int64_t count, float* out) {
    using namespace pd;
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t width = count - i < LANES ? count - i : LANES;
        u32x16 token = {};
        if (ids) {
            for (int64_t j = 0; j < width; ++j) token[j] = static_cast<uint32_t>(ids[i + j]);
        } else {
            token = u32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + static_cast<uint32_t>(i);
        }
        f32x16 noise = gumbel(token, seed, position);
        if (width == LANES) {
            store(out + i, noise);
        } else {
            for (int64_t j = 0; j < width; ++j) out[i + j] = noise[j];
        }
    }
}
