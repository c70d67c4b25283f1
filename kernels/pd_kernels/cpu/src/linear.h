// What linear layers over tiles share: the shape of a call and how finished sums leave, scaled, biased and rounded.
// Invariant: a row's sums are added up in the same order whatever rows accompany it.
#pragma once
#include "amx.h"

#include <algorithm>

#if defined(PD_HAS_AMX)
namespace pd {
namespace amx {

constexpr int64_t BLOCK_ROWS = 256;  // rows of x that stay in the second cache level while all of W passes by
constexpr int64_t LARGE_OUTPUT = 1 << 20;  // bytes; from here on stores go past the caches (2.5 times as fast at 12 MB)

struct Shape {
    int64_t rows, n, k;
    bool past_cache;  // the output is too large for the second cache level and its rows are whole cache lines
};

inline void store_32(float* out, f32x16 left, f32x16 right, bool past_cache) {
    if (past_cache) {
        _mm512_stream_ps(out, reinterpret_cast<__m512>(left));
        _mm512_stream_ps(out + 16, reinterpret_cast<__m512>(right));
    } else {
        store(out, left);
        store(out + 16, right);
    }
}
inline void store_32(bf16* out, f32x16 left, f32x16 right, bool past_cache) {
    __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(right), reinterpret_cast<__m512>(left));
    if (past_cache) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out), reinterpret_cast<__m512i>(both));
    } else {
        std::memcpy(out, &both, 64);
    }
}

// Sums of a finished block on their way out, a few rows at a time while the next block is multiplied.
template <class Out>
struct Drain {
    const float* c;
    const float* bias;   // may be null
    const float* scale;  // of each column; may be null
    Out* out;
    int64_t rows, columns, out_row;
    bool past_cache;

    void write(int64_t count) {
        for (; count > 0 && rows > 0; --count, --rows, c += 32, out += out_row) {
            if (columns == 32) {
                f32x16 left = load(c), right = load(c + 16);
                if (scale) left *= load(scale), right *= load(scale + 16);
                if (bias) left += load(bias), right += load(bias + 16);
                store_32(out, left, right, past_cache);
            } else {
                for (int64_t j = 0; j < columns; ++j) store_one(out + j, c[j] * (scale ? scale[j] : 1.0f) + (bias ? bias[j] : 0.0f));
            }
        }
    }
};

template <class Out>
bool is_past_cache(const Out* out, const Shape& s) {
    int64_t row_bytes = s.n * static_cast<int64_t>(sizeof(Out));
    return s.rows * row_bytes > LARGE_OUTPUT && row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
}

}  // namespace amx
}  // namespace pd
#endif
