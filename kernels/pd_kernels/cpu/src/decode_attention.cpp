// Decode attention: bound by reading the cache once. All query heads of a KV head share each load; softmax is online
// over chunks (Milakov and Gimelshein, 2018), scores and sums in float32.
#include "attention.h"

namespace pd {
namespace {

constexpr int64_t CHUNK = 128;   // tokens between two rescalings
constexpr int64_t MAX_GROUP = 16;  // query heads per pass over the cache
constexpr float MASKED = -1e30f;

template <class T>
void prefetch_rows(const T* const* rows, int64_t count, int64_t dim) {
    for (int64_t t = 0; t < count; ++t)
        for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(rows[t] + i);
}

template <int DIM, class T>
f32x16 scores_of_16(const T* q, const T* const* rows) {
    f32x16 acc[16];
    for (int t = 0; t < 16; ++t) {
        f32x16 sum = {};
        int i = 0;
        for (; i + 32 <= DIM; i += 32) sum = dot_pairs(sum, q + i, rows[t] + i);
        if (i < DIM) sum = fma(load(q + i), load(rows[t] + i), sum);
        acc[t] = sum;
    }
    return sum_each(acc);
}

struct Softmax {
    float highest = MASKED, total = 0.0f;
};

// Scores -> weights in place, `count` padded to 16; returns the factor for what was accumulated before.
float update(Softmax& state, float* scores, int64_t padded, float scale) {
    f32x16 top = splat(MASKED);
    for (int64_t i = 0; i < padded; i += 16) top = max(top, load(scores + i));
    float best = highest(top) * scale;
    best = best > state.highest ? best : state.highest;
    f32x16 total = {};
    for (int64_t i = 0; i < padded; i += 16) {
        f32x16 weight = exp(load(scores + i) * scale - best);
        store(scores + i, weight);
        total += weight;
    }
    float factor = exp(splat(state.highest - best))[0];
    state.total = state.total * factor + sum(total);
    state.highest = best;
    return factor;
}

template <int DIM, class T>
void add_values(const T* const* rows, int64_t count, const float* weights, int64_t group, float* acc) {
    alignas(64) float tile[16 * DIM];
    for (int64_t t = 0; t < count; ++t)
        for (int i = 0; i < DIM; i += 16) store(tile + t * DIM + i, load(rows[t] + i));
    for (int64_t g = 0; g < group; ++g) {
        f32x16 sums[DIM / 16];
        for (int i = 0; i < DIM / 16; ++i) sums[i] = load(acc + g * DIM + i * 16);
        for (int64_t t = 0; t < count; ++t) {
            f32x16 weight = splat(weights[g * CHUNK + t]);
            for (int i = 0; i < DIM / 16; ++i) sums[i] = fma(weight, load(tile + t * DIM + i * 16), sums[i]);
        }
        for (int i = 0; i < DIM / 16; ++i) store(acc + g * DIM + i * 16, sums[i]);
    }
}

template <int DIM, class T>
void attend(const T* q, const Cache<T>& keys, const Cache<T>& values, int64_t context, int64_t group, float scale, T* out) {
    alignas(64) float scores[MAX_GROUP * CHUNK];
    alignas(64) float acc[MAX_GROUP * DIM] = {};
    const T *k[CHUNK + 16], *v[CHUNK + 16];
    Softmax state[MAX_GROUP];
    for (int64_t first = 0; first < context; first += CHUNK) {
        int64_t count = context - first < CHUNK ? context - first : CHUNK, padded = (count + 15) / 16 * 16;
        keys.rows(first, count, k);
        values.rows(first, count, v);
        for (int64_t t = count; t < padded; ++t) k[t] = k[count - 1];
        if (first == 0) prefetch_rows(k, count < 16 ? count : 16, DIM);
        for (int64_t t = 0; t < padded; t += 16) {
            if (t + 16 < count) prefetch_rows(k + t + 16, count - t - 16 < 16 ? count - t - 16 : 16, DIM);
            prefetch_rows(v + t, count - t < 16 ? count - t : 16, DIM);
            for (int64_t g = 0; g < group; ++g) store(scores + g * CHUNK + t, scores_of_16<DIM>(q + g * DIM, k + t));
        }
        for (int64_t g = 0; g < group; ++g) {
            for (int64_t t = count; t < padded; ++t) scores[g * CHUNK + t] = MASKED / scale;
            float factor = update(state[g], scores + g * CHUNK, padded, scale);
            for (int i = 0; i < DIM; i += 16) store(acc + g * DIM + i, load(acc + g * DIM + i) * factor);
        }
        if (first + count < context) {  // the next chunk's first keys arrive while this one's values are summed
            int64_t ahead = context - first - count < 16 ? context - first - count : 16;
            keys.rows(first + count, ahead, k);
            prefetch_rows(k, ahead, DIM);
        }
        for (int64_t t = 0; t < count; t += 16)
            add_values<DIM>(v + t, count - t < 16 ? count - t : 16, scores + t, group, acc);
    }
    for (int64_t g = 0; g < group; ++g)
        for (int i = 0; i < DIM; i += 16) store(out + g * DIM + i, load(acc + g * DIM + i) * (1.0f / state[g].total));
}

}  // namespace

template <class T>
void attend_one(const T* q, const Cache<T>& keys, const Cache<T>& values, int64_t context, int64_t group, int64_t dim, float scale, T* out) {
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
        int64_t part = group - g < MAX_GROUP ? group - g : MAX_GROUP;
        const T* from = q + g * dim;
        T* to = out + g * dim;
        switch (dim) {
            case 16: attend<16>(from, keys, values, context, part, scale, to); break;
            case 32: attend<32>(from, keys, values, context, part, scale, to); break;
            case 64: attend<64>(from, keys, values, context, part, scale, to); break;
            case 80: attend<80>(from, keys, values, context, part, scale, to); break;
            case 96: attend<96>(from, keys, values, context, part, scale, to); break;
            case 128: attend<128>(from, keys, values, context, part, scale, to); break;
            case 256: attend<256>(from, keys, values, context, part, scale, to); break;
        }
    }
}

template void attend_one(const float*, const Cache<float>&, const Cache<float>&, int64_t, int64_t, int64_t, float, float*);
template void attend_one(const bf16*, const Cache<bf16>&, const Cache<bf16>&, int64_t, int64_t, int64_t, float, bf16*);

namespace {

template <class T>
void decode(const T* q, const T* kv, const int32_t* contexts, const int32_t* tables, T* out, const AttentionShape& s, int threads) {
    int64_t group = s.q_heads / s.kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < s.requests * s.kv_heads; ++item) {
        int64_t request = item / s.kv_heads, head = item % s.kv_heads;
        int64_t row = (request * s.q_heads + head * group) * s.dim;
        attend_one(q + row, cache_of(kv, tables, request, head, 0, s), cache_of(kv, tables, request, head, 1, s), contexts[request],
                   group, s.dim, s.scale, out + row);
    }
}

}  // namespace
}  // namespace pd

extern "C" void pd_decode_attention(int is_bf16, const void* q, const void* kv, const int32_t* contexts, const int32_t* tables, void* out,
                                    const pd::AttentionShape* shape, int threads) {
    using pd::bf16;
    if (is_bf16) {
        pd::decode(static_cast<const bf16*>(q), static_cast<const bf16*>(kv), contexts, tables, static_cast<bf16*>(out), *shape, threads);
    } else {
        pd::decode(static_cast<const float*>(q), static_cast<const float*>(kv), contexts, tables, static_cast<float*>(out), *shape, threads);
    }
}
