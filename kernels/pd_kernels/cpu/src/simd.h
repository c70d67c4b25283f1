// Sixteen float lanes in GCC/clang vector extensions: AVX-512 where the CPU has it, split by the compiler elsewhere.
// Owns loads, stores, bf16 conversion, horizontal sums and exp; float32 results are accurate to a few units in the last place.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pd {

typedef float f32x16 __attribute__((vector_size(64), may_alias));
typedef float f32x16u __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), may_alias));
typedef uint16_t u16x16u __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

constexpr int LANES = 16;
constexpr int64_t MAX_HEAD_DIM = 256;

inline f32x16 splat(float value) { return value - f32x16{}; }

inline f32x16 load(const float* p) { return *reinterpret_cast<const f32x16u*>(p); }
inline u32x16 load_bits(const bf16* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<u32x16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    return __builtin_convertvector(*reinterpret_cast<const u16x16u*>(p), u32x16);
#endif
}
inline f32x16 load(const bf16* p) { return reinterpret_cast<f32x16>(load_bits(p) << 16); }

inline void store(float* p, f32x16 value) { *reinterpret_cast<f32x16u*>(p) = value; }
inline u16x16 to_bf16(f32x16 value) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<u16x16>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(value)));
#else
    u32x16 bits = reinterpret_cast<u32x16>(value);  // round to nearest, ties to even; a NaN stays one
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 quiet = (bits >> 16) | 0x40u;
    return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, u16x16);
#endif
}
inline void store(bf16* p, f32x16 value) { *reinterpret_cast<u16x16u*>(p) = to_bf16(value); }

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline void store_one(float* p, float value) { *p = value; }
inline void store_one(bf16* p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    p->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(_mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
    return a * b + c;  // contracted to fused multiply-adds by -ffp-contract=fast
#endif
}
inline f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
    return a > b ? a : b;
#endif
}

struct Add {
    static f32x16 of(f32x16 a, f32x16 b) { return a + b; }
};
struct Max {
    static f32x16 of(f32x16 a, f32x16 b) { return max(a, b); }
};

// One level of a 16 x 16 reduction: lanes of a and b at distance 8, 4, 2, 1 meet.
template <class Op>
inline f32x16 fold8(f32x16 a, f32x16 b) {
    return Op::of(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                  __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
}
template <class Op>
inline f32x16 fold4(f32x16 a, f32x16 b) {
    return Op::of(__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
}
template <class Op>
inline f32x16 fold2(f32x16 a, f32x16 b) {
    return Op::of(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
}
template <class Op>
inline f32x16 fold1(f32x16 a, f32x16 b) {
    return Op::of(__builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                  __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

// Lane i of the result is the sum (or the maximum) over the lanes of v[i].
template <class Op>
inline f32x16 reduce_each(const f32x16* v) {
    f32x16 a[8], b[4];
    for (int i = 0; i < 8; ++i) a[i] = fold8<Op>(v[i], v[i + 8]);
    for (int i = 0; i < 4; ++i) b[i] = fold4<Op>(a[i], a[i + 4]);
    return fold1<Op>(fold2<Op>(b[0], b[2]), fold2<Op>(b[1], b[3]));
}
template <class Op>
inline float reduce(f32x16 v) {
    v = fold8<Op>(v, v);
    v = fold4<Op>(v, v);
    v = fold2<Op>(v, v);
    return fold1<Op>(v, v)[0];
}
inline f32x16 sum_each(const f32x16* v) { return reduce_each<Add>(v); }
inline f32x16 highest_each(const f32x16* v) { return reduce_each<Max>(v); }
inline float sum(f32x16 v) { return reduce<Add>(v); }
inline float highest(f32x16 v) { return reduce<Max>(v); }

// exp by x = n ln 2 + r, |r| <= ln 2 / 2, and the Taylor series of r to the seventh power (its error is below 1e-8).
// Below -87 the result is 0: masked scores, -1e30, vanish exactly, and no lane ever holds a denormal, which would be slow.
inline f32x16 exp(f32x16 x) {
#if defined(__AVX512F__)
    __m512 wide = reinterpret_cast<__m512>(x), lowest = _mm512_set1_ps(-87.0f);
    f32x16 clamped = reinterpret_cast<f32x16>(_mm512_min_ps(_mm512_max_ps(wide, lowest), _mm512_set1_ps(88.0f)));
    f32x16 n = reinterpret_cast<f32x16>(_mm512_roundscale_ps(reinterpret_cast<__m512>(clamped * 1.44269504f), 8));
#else
    f32x16 clamped = x > 88.0f ? splat(88.0f) : (x < -87.0f ? splat(-87.0f) : x);
    f32x16 n = fma(clamped, splat(1.44269504f), splat(12582912.0f)) - 12582912.0f;  // 1.5 * 2^23 rounds to an integer
#endif
    f32x16 r = fma(n, splat(-0.693359375f), clamped);  // 0.693359375 has 9 bits, so n times it is exact
    r = fma(n, splat(2.12194440e-4f), r);
    f32x16 y = splat(1.0f / 5040);
    y = fma(y, r, splat(1.0f / 720));
    y = fma(y, r, splat(1.0f / 120));
    y = fma(y, r, splat(1.0f / 24));
    y = fma(y, r, splat(1.0f / 6));
    y = fma(y, r, splat(0.5f));
    y = fma(y, r, splat(1.0f));
    y = fma(y, r, splat(1.0f));
#if defined(__AVX512F__)
    __mmask16 above = _mm512_cmp_ps_mask(wide, lowest, _CMP_GE_OQ);
    return reinterpret_cast<f32x16>(_mm512_maskz_scalef_ps(above, reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(n)));
#else
    i32x16 exponent = __builtin_convertvector(n, i32x16) << 23;
    f32x16 result = reinterpret_cast<f32x16>(reinterpret_cast<i32x16>(y) + exponent);
    return x < -87.0f ? f32x16{} : result;
#endif
}

// Products of 32 pairs of bf16, summed in pairs into 16 lanes.
inline f32x16 dot_pairs(f32x16 acc, const bf16* a, const bf16* b) {
#if defined(__AVX512BF16__)
    __m512bh x, y;
    std::memcpy(&x, a, 64);
    std::memcpy(&y, b, 64);
    return reinterpret_cast<f32x16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), x, y));
#else
    u32x16 x, y;
    std::memcpy(&x, a, 64);
    std::memcpy(&y, b, 64);
    acc = fma(reinterpret_cast<f32x16>(x << 16), reinterpret_cast<f32x16>(y << 16), acc);
    return fma(reinterpret_cast<f32x16>(x & 0xffff0000u), reinterpret_cast<f32x16>(y & 0xffff0000u), acc);
#endif
}
inline f32x16 dot_pairs(f32x16 acc, const float* a, const float* b) {
    return fma(load(a + 16), load(b + 16), fma(load(a), load(b), acc));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace pd
