// AMX tiles: configuration, packing into B tiles, and the one product both linear layers and prefill attention use.
// B is packed as tiles of 16 columns and 32 of depth, 1 KiB each; tile row i holds the depths 2i and 2i + 1 of 16 columns.
// Invariant: whoever configures tiles releases them before returning, so other libraries find them unused.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define PD_HAS_AMX 1
namespace pd {
namespace amx {

constexpr int64_t TILE = 512;  // elements in a packed tile

struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0-3 accumulate, 4 and 5 hold `first` and `second` rows of A, 6 and 7 hold B. second = 0: only tiles 0, 1 and 4 are used.
inline void configure(int first, int second) {
    Config config;
    for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64;
    int lower = second > 0 ? second : 1;
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(first);
    config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(lower);
    config.rows[6] = config.rows[7] = 16;
    _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }

// c [16 + up to 16 rows][32 columns] (+)= a x b, where b is a pair of panels of 16 columns whose tiles alternate:
// [depth / 32][2][512]. `meanwhile(k)` runs once per step of depth, in the shadow of the tile products.
template <class Meanwhile>
inline void multiply_2x2(const bf16* a, int64_t a_row, const bf16* b, int64_t depth_tiles, float* c, int64_t c_row, bool accumulate,
                         const Meanwhile& meanwhile) {
    const bf16* a1 = a + 16 * a_row;
    float* c1 = c + 16 * c_row;
    if (accumulate) {
        _tile_loadd(0, c, c_row * 4);
        _tile_loadd(1, c + 16, c_row * 4);
        _tile_loadd(2, c1, c_row * 4);
        _tile_loadd(3, c1 + 16, c_row * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth_tiles; ++k) {
        _tile_loadd(4, a + k * 32, a_row * 2);
        _tile_loadd(6, b + k * 2 * TILE, 64);
        _tile_loadd(7, b + k * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + k * 32, a_row * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        meanwhile(k);
    }
    _tile_stored(0, c, c_row * 4);
    _tile_stored(1, c + 16, c_row * 4);
    _tile_stored(2, c1, c_row * 4);
    _tile_stored(3, c1 + 16, c_row * 4);
}

// The same for at most 16 rows.
template <class Meanwhile>
inline void multiply_1x2(const bf16* a, int64_t a_row, const bf16* b, int64_t depth_tiles, float* c, int64_t c_row,
                         const Meanwhile& meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < depth_tiles; ++k) {
        _tile_loadd(4, a + k * 32, a_row * 2);
        _tile_loadd(6, b + k * 2 * TILE, 64);
        _tile_loadd(7, b + k * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        meanwhile(k);
    }
    _tile_stored(0, c, c_row * 4);
    _tile_stored(1, c + 16, c_row * 4);
}

// One tile from 16 rows of a row-major matrix [n][k]; rows past its end are zero.
inline void pack_tile(const bf16* matrix, int64_t row, int64_t n, bf16* tile) {
    if (n < 16) std::memset(tile, 0, TILE * sizeof(bf16));
    for (int64_t column = 0; column < (n < 16 ? n : 16); ++column)
        for (int64_t pair = 0; pair < 16; ++pair) std::memcpy(tile + pair * 32 + column * 2, matrix + column * row + pair * 2, 4);
}

// 16 x 16 pairs of bf16.
inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int c = 0; c < 4; ++c) {  // r[4 i + c] holds columns c, 4 + c, 8 + c, 12 + c of rows 4 i to 4 i + 3
        __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd), e = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
        t[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88), t[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace amx
}  // namespace pd
#endif
