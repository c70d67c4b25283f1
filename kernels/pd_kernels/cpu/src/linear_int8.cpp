// Linear layers y = (x Q^T) * scale + b over int8 weights Q, half the bytes of bf16. Integers up to 127 are exact in bf16, so
// AMX multiplies them as they are and only finished sums are scaled. Without AMX: Q row-major, widened to float32 in registers.
#include "linear.h"

#include <vector>

namespace pd {

typedef int8_t i8x16u __attribute__((vector_size(16), aligned(1), may_alias));

inline f32x16 load(const int8_t* p) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return reinterpret_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const i8x16u*>(p), i32x16), f32x16);
#endif
}

// ---- row-major: R rows of x against O rows of Q, R * O = 16 accumulators

template <int R, int O>
void dot_block(const float* x, const int8_t* weight, float* sums, int64_t n, int64_t k, int64_t rows) {
    const int8_t* w[O];
    const float* a[R];
    for (int o = 0; o < O; ++o) w[o] = weight + std::min<int64_t>(o, n - 1) * k;
    for (int r = 0; r < R; ++r) a[r] = x + std::min<int64_t>(r, rows - 1) * k;
    f32x16 acc[16] = {};
    for (int64_t i = 0; i < k; i += 16) {
        for (int o = 0; o < O; ++o) {
            if (i % 64 == 0) prefetch(w[o] + O * k + i);
            f32x16 wide = load(w[o] + i);
            for (int r = 0; r < R; ++r) acc[r * O + o] = fma(load(a[r] + i), wide, acc[r * O + o]);
        }
    }
    store(sums, sum_each(acc));
}

constexpr int64_t FEW = 64;  // rows of x widened at a time

template <class T, class Out>
void int8_rows(const T* x, const int8_t* weight, const float* scale, const float* bias, Out* out, int64_t rows, int64_t n, int64_t k,
               int threads) {
    std::vector<float> wide(std::min(rows, FEW) * k);
    for (int64_t r0 = 0; r0 < rows; r0 += FEW) {
        int64_t count = std::min(FEW, rows - r0);
        for (int64_t i = 0; i < count * k; i += 16) store(wide.data() + i, load(x + r0 * k + i));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t n0 = 0; n0 < n; n0 += 16) {
            int64_t width = std::min<int64_t>(16, n - n0);
            for (int64_t r = 0; r < count; r += 4) {
                int64_t left = std::min<int64_t>(4, count - r), step = left == 1 ? 16 : left == 2 ? 8 : 4;
                for (int64_t o = 0; o < width; o += step) {
                    alignas(64) float sums[16];
                    const float* a = wide.data() + r * k;
                    const int8_t* w = weight + (n0 + o) * k;
                    if (left == 1) dot_block<1, 16>(a, w, sums, width - o, k, 1);
                    if (left == 2) dot_block<2, 8>(a, w, sums, width - o, k, 2);
                    if (left > 2) dot_block<4, 4>(a, w, sums, width - o, k, left);
                    for (int64_t i = 0; i < left; ++i)
                        for (int64_t j = n0 + o; j < std::min(n0 + o + step, n0 + width); ++j)
                            store_one(out + (r0 + r + i) * n + j, sums[i * step + j - n0 - o] * scale[j] + (bias ? bias[j] : 0.0f));
                }
            }
        }
    }
}

#if defined(PD_HAS_AMX)
namespace amx {

constexpr int64_t STEP = 2 * TILE;  // elements of one step of depth: a tile of each panel of a pair
constexpr int64_t RING = 4;         // expanded steps in the first cache level, for few rows
constexpr int64_t LEAD = 2;         // steps between expansion and use, so that stores are done when a tile is loaded

inline void expand_32(const int8_t* from, bf16* to) {
    f32x16 low = load(from), high = load(from + 16);
    __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high), reinterpret_cast<__m512>(low));
    std::memcpy(to, &both, 64);
}
inline void expand_step(const int8_t* from, bf16* to) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < STEP; i += 32) expand_32(from + i, to + i);
}

struct Int8Weights {
    const int8_t* tiles;
    const float *scale, *bias;  // bias may be null
};

// At most 32 rows against the pairs [first, last). Tiles are expanded in one stream from pair to pair, two steps before their use.
template <bool TWO, class Out>
void few_rows(const bf16* x, const Int8Weights& w, Out* out, const Shape& s, int64_t first, int64_t last) {
    alignas(64) float buffers[2 * 1024] = {};
    alignas(64) bf16 ring[RING * STEP];
    int64_t depth = s.k / 32, steps = (last - first) * depth, drained = (32 + depth - 1) / depth;
    const int8_t* from = w.tiles + first * depth * STEP;
    for (int64_t t = 0; t < std::min(LEAD, steps); ++t) expand_step(from + t * STEP, ring + t * STEP);
    Drain<Out> drain{};
    int64_t t = 0;
    for (int64_t pair = first; pair < last; ++pair) {
        float* c = buffers + pair % 2 * 1024;
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) _tile_zero(2);
        if (TWO) _tile_zero(3);
        for (int64_t k = 0; k < depth; ++k, ++t) {
            const bf16* b = ring + t % RING * STEP;
            _tile_loadd(4, x + k * 32, s.k * 2);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (TWO) {
                _tile_loadd(5, x + 16 * s.k + k * 32, s.k * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            const int8_t* ahead = from + (t + LEAD) * STEP;
            for (int64_t i = 0; i < STEP; i += 64) prefetch(ahead + 4 * STEP + i);
            if (t + LEAD < steps) expand_step(ahead, ring + (t + LEAD) % RING * STEP);
            drain.write(drained);
        }
        drain.write(32);
        _tile_stored(0, c, 128);
        _tile_stored(1, c + 16, 128);
        if (TWO) _tile_stored(2, c + 512, 128);
        if (TWO) _tile_stored(3, c + 528, 128);
        int64_t n0 = pair * 32;
        drain = {c, w.bias ? w.bias + n0 : nullptr, w.scale + n0, out + n0, s.rows, std::min<int64_t>(32, s.n - n0), s.n, s.past_cache};
    }
    drain.write(32);
}

// Any number of rows, 256 at a time so that x stays in the second cache level: a pair is expanded while the one before it is
// multiplied.
template <class Out>
void many_rows(const bf16* x, const Int8Weights& w, Out* out, const Shape& s, int64_t first, int64_t last) {
    static thread_local std::vector<bf16> memory;
    alignas(64) float buffers[2 * 1024];
    int64_t depth = s.k / 32, size = depth * STEP, drained = (32 + depth - 1) / depth, parity = 0;
    memory.resize(2 * size + 32);
    bf16* expanded = reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    Drain<Out> drain{};
    for (int64_t block = 0; block < s.rows; block += BLOCK_ROWS) {
        int64_t end = std::min(block + BLOCK_ROWS, s.rows), passes = (end - block + 31) / 32, lines = (32 + passes - 1) / passes;
        if (first < last)
            for (int64_t i = 0; i < size; i += STEP) expand_step(w.tiles + first * size + i, expanded + first % 2 * size + i);
        for (int64_t pair = first; pair < last; ++pair) {
            const bf16* tiles = expanded + pair % 2 * size;
            const int8_t* from = w.tiles + (pair + 1) * size;
            bf16* to = expanded + (pair + 1) % 2 * size;
            int64_t at = pair + 1 < last ? 0 : size, n0 = pair * 32;
            auto meanwhile = [&](int64_t) {
                for (int64_t i = 0; i < lines && at < size; ++i, at += 32) expand_32(from + at, to + at), __builtin_prefetch(from + at + 8192, 0, 2);
                drain.write(drained);
            };
            for (int64_t done = block; done < end; done += 32) {
                int64_t rows = std::min<int64_t>(32, end - done);
                float* c = buffers + (parity ^= 1) * 1024;
                if (rows < 32) configure(static_cast<int>(std::min<int64_t>(16, rows)), static_cast<int>(std::max<int64_t>(0, rows - 16)));
                if (rows > 16) {
                    multiply_2x2(x + done * s.k, s.k, tiles, depth, c, 32, false, meanwhile);
                } else {
                    multiply_1x2(x + done * s.k, s.k, tiles, depth, c, 32, meanwhile);
                }
                if (rows < 32) configure(16, 16);
                drain.write(32);
                drain = {c,    w.bias ? w.bias + n0 : nullptr, w.scale + n0, out + done * s.n + n0,
                         rows, std::min<int64_t>(32, s.n - n0), s.n,         s.past_cache};
            }
            for (; at < size; at += 32) expand_32(from + at, to + at);
        }
    }
    drain.write(32);
}

template <class Out>
void int8_linear(const bf16* x, const Int8Weights& w, Out* out, Shape s, int threads) {
    s.past_cache = is_past_cache(out, s);
    int64_t pairs = (s.n + 31) / 32, parts = std::min<int64_t>(threads, pairs);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t part = 0; part < parts; ++part) {
        int64_t first = pairs * part / parts, last = pairs * (part + 1) / parts;
        int rows = static_cast<int>(std::min<int64_t>(32, s.rows));
        if (s.rows > 32) {
            configure(16, 16);
            many_rows(x, w, out, s, first, last);
        } else if (s.rows > 16) {
            configure(16, rows - 16);
            few_rows<true>(x, w, out, s, first, last);
        } else {
            configure(rows, 0);
            few_rows<false>(x, w, out, s, first, last);
        }
        _mm_sfence();
        release();
    }
}

}  // namespace amx
#endif

}  // namespace pd

using pd::bf16;

// weight [n, k] row-major -> int8 tiles in the order of pd_pack_tiles; `packed` holds ceil(n / 32) * 32 * k. k is a multiple of 32.
extern "C" void pd_pack_int8_tiles(const int8_t* weight, int8_t* packed, int64_t n, int64_t k) {
#if defined(PD_HAS_AMX)
    for (int64_t n0 = 0; n0 < n; n0 += 32)
        for (int64_t k0 = 0; k0 < k; k0 += 32)
            for (int64_t half = n0; half < n0 + 32; half += 16, packed += pd::amx::TILE)
                for (int64_t column = 0; column < 16; ++column)
                    for (int64_t d = 0; d < 32; ++d)
                        packed[d / 2 * 32 + column * 2 + d % 2] = half + column < n ? weight[(half + column) * k + k0 + d] : 0;
#endif
}

extern "C" void pd_int8_tiles(const bf16* x, const int8_t* packed, const float* scale, const float* bias, void* out, int64_t rows, int64_t n,
                              int64_t k, int out_is_float, int threads) {
#if defined(PD_HAS_AMX)
    if (rows == 0) return;  // tiles of no rows cannot be configured
    pd::amx::Shape shape{rows, n, k, false};
    pd::amx::Int8Weights weights{packed, scale, bias};
    if (out_is_float) {
        pd::amx::int8_linear(x, weights, static_cast<float*>(out), shape, threads);
    } else {
        pd::amx::int8_linear(x, weights, static_cast<bf16*>(out), shape, threads);
    }
#endif
}

extern "C" void pd_int8_rows(int is_bf16, const void* x, const int8_t* weight, const float* scale, const float* bias, void* out, int64_t rows,
                             int64_t n, int64_t k, int out_is_float, int threads) {
    if (!is_bf16) {
        pd::int8_rows(static_cast<const float*>(x), weight, scale, bias, static_cast<float*>(out), rows, n, k, threads);
    } else if (out_is_float) {
        pd::int8_rows(static_cast<const bf16*>(x), weight, scale, bias, static_cast<float*>(out), rows, n, k, threads);
    } else {
        pd::int8_rows(static_cast<const bf16*>(x), weight, scale, bias, static_cast<bf16*>(out), rows, n, k, threads);
    }
}
