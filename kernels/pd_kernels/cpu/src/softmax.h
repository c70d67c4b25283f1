// The online softmax of decode attention: one query head's running maximum and sum over chunks of tokens.
#pragma once
#include "simd.h"

namespace pd {

constexpr int64_t CHUNK = 64;   // most tokens between two rescalings
constexpr int64_t MAX_GROUP = 16;  // query heads per pass over the cache
constexpr float MASKED = -1e30f;

struct Softmax {
    float highest = MASKED, total = 0.0f;
};

// Scores -> weights, `padded` of them (a multiple of 16); returns the factor for what was accumulated before.
template <class T>
inline float update(Softmax& state, const float* scores, int64_t padded, float scale, T* weights) {
    f32x16 top = splat(MASKED);
    for (int64_t i = 0; i < padded; i += 16) top = max(top, load(scores + i));
    float best = highest(top) * scale;
    best = best > state.highest ? best : state.highest;
    f32x16 total = {}, offset = splat(-best);
    for (int64_t i = 0; i < padded; i += 16) {
        f32x16 weight = exp(fma(load(scores + i), splat(scale), offset));
        store(weights + i, weight);
        total += weight;
    }
    float factor = state.highest == best ? 1.0f : exp(splat(state.highest - best))[0];
    state.total = state.total * factor + sum(total);
    state.highest = best;
    return factor;
}

}  // namespace pd
