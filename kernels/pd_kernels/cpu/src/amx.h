// AMX tiles: configuration, packing into B tiles, and the one product both linear layers and prefill attention use.
// B is packed as tiles [16 columns][32 deep] of 1 KiB; tile row i holds the pairs (2i, 2i + 1) of depth for 16 columns.
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

// Tiles 0-3 accumulate, 4 and 5 hold `first` and `second` rows of A, 6 and 7 hold B.
// In the 1 x 4 shape (second = 0) all four accumulators belong to the first A tile.
inline void configure(int first, int second) {
    Config config;
    for (int t = 0; t < 8; ++t) config.row_bytes[t] = 64;
    int upper = second > 0 ? second : first;
    config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(first);
    config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(upper);
    config.rows[6] = config.rows[7] = 16;
    _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }

inline void prefetch_tile(const bf16* tile) {
    for (int i = 0; i < 16; ++i) prefetch(tile + i * 32);
}

// c [first + second rows][32 columns] (+)= a x two panels of B; `stride` is the distance of the panels, in elements.
inline void multiply_2x2(const bf16* a, int64_t a_row, int64_t first, const bf16* b, int64_t stride, int64_t depth_tiles,
                         float* c, int64_t c_row, bool accumulate) {
    const bf16* a1 = a + first * a_row;
    float* c1 = c + first * c_row;
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
        _tile_loadd(6, b + k * TILE, 64);
        _tile_loadd(7, b + stride + k * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1 + k * 32, a_row * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_row * 4);
    _tile_stored(1, c + 16, c_row * 4);
    _tile_stored(2, c1, c_row * 4);
    _tile_stored(3, c1 + 16, c_row * 4);
}

// One packed tile of columns n0.. and depth k0.. from a row-major matrix [n][k]; what lies outside is zero.
inline void pack_tile(const bf16* matrix, int64_t row, int64_t n, int64_t k, bf16* tile) {
    if (n >= 16 && k >= 32) {
        for (int column = 0; column < 16; ++column) {
            const char* source = reinterpret_cast<const char*>(matrix + column * row);
            char* target = reinterpret_cast<char*>(tile) + column * 4;
            for (int pair = 0; pair < 16; ++pair) std::memcpy(target + pair * 64, source + pair * 4, 4);
        }
        return;
    }
    std::memset(tile, 0, 1024);
    for (int64_t column = 0; column < (n < 16 ? n : 16); ++column)
        for (int64_t d = 0; d < (k < 32 ? k : 32); ++d) tile[d / 2 * 32 + column * 2 + d % 2] = matrix[column * row + d];
}

}  // namespace amx
}  // namespace pd
#endif
