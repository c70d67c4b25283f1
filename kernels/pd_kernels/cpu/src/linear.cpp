// Linear layers y = x W^T + b over weights that are read once per call, from huge pages.
// bf16 with AMX: W packed into tiles, any number of rows. Otherwise: W row-major, for few rows.
#include "amx.h"

#include <algorithm>

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
// ---- AMX: columns in groups of four panels of 16 (n padded to 64, k to 32)

namespace amx {

// Up to 16 rows: four panels are four streams through memory, prefetched ahead.
void multiply_1x4(const bf16* a, int64_t a_row, const bf16* b, int64_t stride, int64_t depth_tiles, float* c) {
    constexpr int64_t AHEAD = 4 * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth_tiles; ++k) {
        const bf16* tile = b + k * TILE;
        _tile_loadd(4, a + k * 32, a_row * 2);
        prefetch_tile(tile + AHEAD);
        _tile_loadd(6, tile, 64);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_tile(tile + stride + AHEAD);
        _tile_loadd(7, tile + stride, 64);
        _tile_dpbf16ps(1, 4, 7);
        prefetch_tile(tile + 2 * stride + AHEAD);
        _tile_loadd(6, tile + 2 * stride, 64);
        _tile_dpbf16ps(2, 4, 6);
        prefetch_tile(tile + 3 * stride + AHEAD);
        _tile_loadd(7, tile + 3 * stride, 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, 256);
    _tile_stored(1, c + 16, 256);
    _tile_stored(2, c + 32, 256);
    _tile_stored(3, c + 48, 256);
}

template <class Out>
void write_block(const float* c, const float* bias, Out* out, int64_t rows, int64_t columns, int64_t out_row) {
    for (int64_t r = 0; r < rows; ++r) {
        int64_t j = 0;
        for (; j + 16 <= columns; j += 16) {
            f32x16 value = load(c + r * 64 + j);
            store(out + r * out_row + j, bias ? value + load(bias + j) : value);
        }
        for (; j < columns; ++j) store_one(out + r * out_row + j, c[r * 64 + j] + (bias ? bias[j] : 0.0f));
    }
}

struct Shape {
    int64_t rows, n, k;
};

template <class Out>
void linear_group(const bf16* x, const bf16* group, const float* bias, Out* out, const Shape& s, int64_t columns) {
    alignas(64) float c[32 * 64];
    int64_t depth_tiles = (s.k + 31) / 32, stride = depth_tiles * TILE;
    int64_t pairs = columns > 32 ? 2 : 1;
    if (s.rows > 16) {
        configure(16, 16);
        int64_t done = 0;
        while (s.rows - done > 16) {
            int64_t rows = std::min<int64_t>(32, s.rows - done);
            if (rows < 32) configure(16, static_cast<int>(rows - 16));
            for (int64_t p = 0; p < pairs; ++p)
                multiply_2x2(x + done * s.k, s.k, 16, group + 2 * p * stride, stride, depth_tiles, c + p * 32, 64, false);
            write_block(c, bias, out + done * s.n, rows, columns, s.n);
            done += rows;
        }
        if (done == s.rows) return;
        x += done * s.k;
        out += done * s.n;
        int64_t rows = s.rows - done;
        configure(static_cast<int>(rows), 0);
        multiply_1x4(x, s.k, group, stride, depth_tiles, c);
        write_block(c, bias, out, rows, columns, s.n);
        return;
    }
    multiply_1x4(x, s.k, group, stride, depth_tiles, c);
    write_block(c, bias, out, s.rows, columns, s.n);
}

template <class Out>
void linear(const bf16* x, const bf16* packed, const float* bias, Out* out, const Shape& s, int threads) {
    int64_t group = 4 * ((s.k + 31) / 32) * TILE;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (s.rows <= 16) configure(static_cast<int>(s.rows), 0);
#pragma omp for schedule(static)
        for (int64_t n0 = 0; n0 < s.n; n0 += 64)
            linear_group(x, packed + n0 / 64 * group, bias ? bias + n0 : nullptr, out + n0, s, std::min<int64_t>(64, s.n - n0));
        release();
    }
}

}  // namespace amx
#endif

}  // namespace pd

using pd::bf16;

// weight [n, k] row-major -> tiles; `packed` holds ceil(n / 64) * 64 * ceil(k / 32) * 32 elements. k is a multiple of 32.
extern "C" void pd_pack_tiles(const bf16* weight, bf16* packed, int64_t n, int64_t k) {
#if defined(PD_HAS_AMX)
    int64_t panels = (n + 63) / 64 * 4;
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t k0 = 0; k0 < k; k0 += 32, packed += pd::amx::TILE)
            pd::amx::pack_tile(weight + p * 16 * k + k0, k, n - p * 16, k - k0, packed);
#endif
}

extern "C" void pd_linear_tiles(const bf16* x, const bf16* packed, const float* bias, void* out, int64_t rows, int64_t n, int64_t k,
                                int out_is_float, int threads) {
#if defined(PD_HAS_AMX)
    pd::amx::Shape shape{rows, n, k};
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
