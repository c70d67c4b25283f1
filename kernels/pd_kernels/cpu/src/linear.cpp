// Linear layers y = x W^T + b over weights that are read once per call, from huge pages.
// bf16 with AMX: W packed into tiles, any number of rows. Otherwise: W row-major, for few rows.
#include "linear.h"

namespace pd {

// ---- row-major weights, few rows: R rows of x against O rows of W, R * O = 16 accumulators

template <class T, int R, int O>
void dot_block(const T* x, const T* weight, const float* bias, float* out, int64_t n0, int64_t n, int64_t k, int64_t rows,
               int64_t out_row) {
    const T* w[O];
    const T* a[R];
    for (int o = 0; o < O; ++o) w[o] = weight + std::min<int64_t>(n0 + o, n - 1) * k;
    for (int r = 0; r < R; ++r) a[r] = x + std::min<int64_t>(r, rows - 1) * k;
    f32x16 acc[16] = {};
    for (int64_t i = 0; i < k; i += 32) {
        for (int o = 0; o < O; ++o) {
            prefetch(w[o] + O * k + i);
            if (sizeof(T) == 4) prefetch(w[o] + O * k + i + 16);
            for (int r = 0; r < R; ++r) acc[r * O + o] = dot_pairs(acc[r * O + o], a[r] + i, w[o] + i);
        }
    }
    f32x16 sums = sum_each(acc);
    for (int r = 0; r < R && r < rows; ++r)
        for (int o = 0; o < O && n0 + o < n; ++o) out[r * out_row + n0 + o] = sums[r * O + o] + (bias ? bias[n0 + o] : 0.0f);
}

template <class T, class Out>
void linear_rows(const T* x, const T* weight, const float* bias, Out* out, int64_t rows, int64_t n, int64_t k, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n0 = 0; n0 < n; n0 += 16) {
        alignas(64) float block[4 * 16];
        int64_t width = std::min<int64_t>(16, n - n0);
        const float* b = bias ? bias + n0 : nullptr;
        for (int64_t r = 0; r < rows; r += 4) {  // rows after the first four find the weights in the first cache level
            int64_t left = std::min<int64_t>(4, rows - r);
            if (left == 1) {
                dot_block<T, 1, 16>(x + r * k, weight + n0 * k, b, block, 0, width, k, 1, 16);
            } else if (left == 2) {
                for (int64_t o = 0; o < width; o += 8) dot_block<T, 2, 8>(x + r * k, weight + n0 * k, b, block, o, width, k, 2, 16);
            } else {
                for (int64_t o = 0; o < width; o += 4) dot_block<T, 4, 4>(x + r * k, weight + n0 * k, b, block, o, width, k, left, 16);
            }
            for (int64_t i = 0; i < left; ++i)
                for (int64_t o = 0; o < width; ++o) store_one(out + (r + i) * n + n0 + o, block[i * 16 + o]);
        }
    }
}

#if defined(PD_HAS_AMX)
// ---- AMX: W as pairs of panels, 32 columns each (n is padded to 32), one after the other in memory

namespace amx {

// One pair against all rows. What follows it in memory is fetched meanwhile, evenly over the passes: NEAR, into the first cache
// level behind a fetch into the second, is faster for one pass; far ahead, into the second alone, for more.
template <bool NEAR, class Out>
void linear_pair(const bf16* x, const bf16* tiles, const float* bias, Out* out, const Shape& s, int64_t columns, Drain<Out>& drain,
                 float* buffers) {
    int64_t depth_tiles = s.k / 32, passes = (s.rows + 31) / 32;
    int64_t lines = (32 + passes - 1) / passes, drained = (32 + depth_tiles - 1) / depth_tiles;
    const char* ahead = reinterpret_cast<const char*>(tiles) + (NEAR ? 1024 : 65536);
    auto meanwhile = [&](int64_t) {
        for (int64_t i = 0; i < lines; ++i, ahead += 64) {
            __builtin_prefetch(ahead, 0, NEAR ? 3 : 2);
            if (NEAR) __builtin_prefetch(ahead + 8192, 0, 2);
        }
        drain.write(drained);
    };
    for (int64_t done = 0; done < s.rows; done += 32) {
        int64_t rows = std::min<int64_t>(32, s.rows - done);
        float* c = drain.c < buffers + 1024 && drain.c >= buffers ? buffers + 1024 : buffers;
        if (rows < 32) configure(static_cast<int>(std::min<int64_t>(16, rows)), static_cast<int>(std::max<int64_t>(0, rows - 16)));
        if (rows > 16) {
            multiply_2x2(x + done * s.k, s.k, tiles, depth_tiles, c, 32, false, meanwhile);
        } else {
            multiply_1x2(x + done * s.k, s.k, tiles, depth_tiles, c, 32, meanwhile);
        }
        if (rows < 32 && s.rows > 32) configure(16, 16);
        drain = {c, bias, nullptr, out + done * s.n, rows, columns, s.n, s.past_cache};
    }
}

template <class Out>
void linear(const bf16* x, const bf16* packed, const float* bias, Out* out, Shape s, int threads) {
    s.past_cache = is_past_cache(out, s);
    auto* pair_kernel = s.rows <= 32 ? linear_pair<true, Out> : linear_pair<false, Out>;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        alignas(64) float buffers[2 * 1024];  // one block is filled while the other drains
        Drain<Out> drain{};
        configure(16, 16);
        for (int64_t r = 0; r < s.rows; r += BLOCK_ROWS) {
            Shape block{std::min(BLOCK_ROWS, s.rows - r), s.n, s.k, s.past_cache};
#pragma omp for schedule(static) nowait
            for (int64_t n0 = 0; n0 < s.n; n0 += 32)
                pair_kernel(x + r * s.k, packed + n0 * s.k, bias ? bias + n0 : nullptr, out + r * s.n + n0, block,
                            std::min<int64_t>(32, s.n - n0), drain, buffers);
        }
        drain.write(32);
        _mm_sfence();
        release();
    }
}

}  // namespace amx
#endif

}  // namespace pd

using pd::bf16;

// weight [n, k] row-major -> tiles; `packed` holds ceil(n / 32) * 32 * k elements. k is a multiple of 32.
extern "C" void pd_pack_tiles(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
#if defined(PD_HAS_AMX)
    for (int64_t n0 = 0; n0 < n; n0 += 32)
        for (int64_t k0 = 0; k0 < k; k0 += 32)
            for (int64_t half = 0; half < 32; half += 16, packed += pd::amx::TILE)
                pd::amx::pack_tile(weight + (n0 + half) * k + k0, k, n - n0 - half, packed);
#endif
}

extern "C" void pd_linear_tiles(const bf16* x, const bf16* packed, const float* bias, void* out, int64_t rows, int64_t n, int64_t k,
                                int out_is_float, int threads) {
#if defined(PD_HAS_AMX)
    if (rows == 0) return;
    pd::amx::Shape shape{rows, n, k, false};
    if (out_is_float) {
        pd::amx::linear(x, packed, bias, static_cast<float*>(out), shape, threads);
    } else {
        pd::amx::linear(x, packed, bias, static_cast<bf16*>(out), shape, threads);
    }
#endif
}

extern "C" void pd_linear_rows(int is_bf16, const void* x, const void* weight, const float* bias, void* out, int64_t rows, int64_t n,
                               int64_t k, int out_is_float, int threads) {
    if (!is_bf16) {
        pd::linear_rows(static_cast<const float*>(x), static_cast<const float*>(weight), bias, static_cast<float*>(out), rows, n, k, threads);
    } else if (out_is_float) {
        pd::linear_rows(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), bias, static_cast<float*>(out), rows, n, k, threads);
    } else {
        pd::linear_rows(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), bias, static_cast<bf16*>(out), rows, n, k, threads);
    }
}
