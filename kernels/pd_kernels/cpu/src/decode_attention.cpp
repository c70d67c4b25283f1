// Decode attention: bound by reading the cache once. All query heads of a KV head share each load; softmax is online
// over chunks (Milakov and Gimelshein, 2018), scores and sums in float32.
#include "attention.h"

namespace pd {
namespace {

constexpr int64_t CHUNK = 64;   // tokens between two rescalings
constexpr int64_t MAX_GROUP = 16;  // query heads per pass over the cache
constexpr float MASKED = -1e30f;

template <class T>
void prefetch_rows(const T* const* rows, int64_t count, int64_t dim) {
    for (int64_t t = 0; t < count; ++t)
        for (int64_t i = 0; i < dim; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(rows[t] + i);
}

// Scores of 16 rows. Meanwhile elements [from, to) of the rows in `ahead` are fetched: a few lines between products keep memory
// busy, where a burst of them would only stall.
template <int DIM, class T>
f32x16 scores_of_16(const T* q, const T* const* rows, const T* const* ahead, int from, int to) {
    constexpr int LINE = 64 / sizeof(T);
    f32x16 acc[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
        for (int i = from; i < to; i += LINE) prefetch(ahead[t] + i);
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

// Scores -> weights, `padded` of them (a multiple of 16); returns the factor for what was accumulated before.
template <class T>
float update(Softmax& state, const float* scores, int64_t padded, float scale, T* weights) {
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

// acc [group][DIM] += weights [group][CHUNK] x values of `count` rows, while the rows in `ahead` are fetched; float32 weights.
template <int DIM, class T>
void add_values(const T* const* rows, int64_t count, const T* const* ahead, const float* weights, int64_t group, float* acc) {
    alignas(64) float tile[16 * DIM];
    for (int64_t t = 0; t < count; ++t) {
        for (int i = 0; i < DIM; i += 64 / sizeof(T)) prefetch(ahead[t] + i);
        for (int i = 0; i < DIM; i += 16) store(tile + t * DIM + i, load(rows[t] + i));
    }
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

#if defined(__AVX512BF16__)
// The same with bf16 weights, two rows at a time: G heads, WIDTH values from each row. Rows come in pairs; the second of an
// odd last pair has weight 0.
template <int WIDTH, int G>
void add_pairs(const bf16* const* rows, int64_t count, const bf16* const* ahead, int64_t offset, const bf16* weights, float* acc,
               int64_t acc_row) {
    constexpr int N = WIDTH / 16;
    f32x16 sums[G][N];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) sums[g][i] = load(acc + g * acc_row + i * 16);
    for (int64_t t = 0; t < count; t += 2) {
        __m512bh pairs[N];
        if (ahead)
            for (int i = 0; i < WIDTH; i += 32) prefetch(ahead[t] + offset + i), prefetch(ahead[t + 1] + offset + i);
        for (int i = 0; i < N; ++i) {
            int64_t at = offset + i * 16;
            pairs[i] = (__m512bh)(load_bits(rows[t] + at) | (load_bits(rows[t + 1] + at) << 16));
        }
        for (int g = 0; g < G; ++g) {
            int32_t weight;
            std::memcpy(&weight, weights + g * CHUNK + t, 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(weight);
            for (int i = 0; i < N; ++i)
                sums[g][i] = reinterpret_cast<f32x16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[g][i]), pairs[i], both));
        }
    }
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) store(acc + g * acc_row + i * 16, sums[g][i]);
}

template <int WIDTH>
void add_slice(const bf16* const* rows, int64_t count, const bf16* const* ahead, int64_t offset, const bf16* weights, int64_t group,
               float* acc, int64_t acc_row) {
    int64_t g = 0;
    for (; g + 4 <= group; g += 4, ahead = nullptr) add_pairs<WIDTH, 4>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 3) add_pairs<WIDTH, 3>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 2) add_pairs<WIDTH, 2>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 1) add_pairs<WIDTH, 1>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
}

template <int DIM>
void add_values(const bf16* const* rows, int64_t count, const bf16* const* ahead, const bf16* weights, int64_t group, float* acc) {
    int64_t i = 0;
    for (; i + 64 <= DIM; i += 64) add_slice<64>(rows, count, ahead, i, weights, group, acc + i, DIM);
    if (DIM % 64 >= 32) add_slice<32>(rows, count, ahead, i, weights, group, acc + i, DIM), i += 32;
    if (DIM % 32) add_slice<16>(rows, count, ahead, i, weights, group, acc + i, DIM);
}
template <class T>
using Weight = T;
template <class T>
constexpr int64_t STEP = sizeof(T) == 2 ? 32 : 16;  // rows per call of add_values
#else
template <class T>
using Weight = float;
template <class T>
constexpr int64_t STEP = 16;
#endif

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Memory is read ahead all the time: values while their chunk's keys are multiplied, the next keys (of this sequence, or the
// first of `next`) while values are summed.
template <int DIM, class T>
void attend(const T* q, const Cache<T>& keys, const Cache<T>& values, int64_t context, int64_t group, float scale, T* out,
            const Following<T>& next) {
    alignas(64) float scores[MAX_GROUP * CHUNK];
    alignas(64) Weight<T> weights[MAX_GROUP * CHUNK];
    alignas(64) float acc[MAX_GROUP * DIM];
    std::memset(acc, 0, sizeof(float) * group * DIM);
    const T *k[CHUNK + 16], *v[CHUNK + 16];
    Softmax state[MAX_GROUP];
    for (int64_t first = 0; first < context; first += CHUNK) {
        int64_t count = least(context - first, CHUNK), padded = (count + 15) / 16 * 16;
        keys.rows(first, count, k);
        values.rows(first, count, v);
        for (int64_t t = count; t < padded; ++t) k[t] = k[count - 1], v[t] = v[count - 1];
        constexpr int LINES = DIM * sizeof(T) / 64, LINE = 64 / sizeof(T);
        for (int64_t t = 0; t < padded; t += 16)
            for (int64_t g = 0; g < group; ++g) {
                int from = static_cast<int>(g * LINES / group) * LINE, to = static_cast<int>((g + 1) * LINES / group) * LINE;
                store(scores + g * CHUNK + t, scores_of_16<DIM>(q + g * DIM, k + t, v + t, from, to));
            }
        for (int64_t g = 0; g < group; ++g) {
            for (int64_t t = count; t < padded; ++t) scores[g * CHUNK + t] = MASKED / scale;
            float factor = update(state[g], scores + g * CHUNK, padded, scale, weights + g * CHUNK);
            if (factor != 1.0f)
                for (int i = 0; i < DIM; i += 16) store(acc + g * DIM + i, load(acc + g * DIM + i) * factor);
        }
        int64_t after = first + count, ahead = least(context - after, CHUNK);
        if (ahead > 0) {
            keys.rows(after, ahead, k);
        } else if (next.context > 0) {
            ahead = least(next.context, CHUNK);
            next.keys.rows(0, ahead, k);
        }
        for (int64_t t = ahead; t < padded; ++t) k[t] = ahead > 0 ? k[ahead - 1] : v[count - 1];
        for (int64_t t = 0; t < count; t += STEP<T>)
            add_values<DIM>(v + t, least(count - t, STEP<T>), k + t, weights + t, group, acc);
        if (padded < ahead) prefetch_rows(k + padded, ahead - padded, DIM);
    }
    for (int64_t g = 0; g < group; ++g)
        for (int i = 0; i < DIM; i += 16) store(out + g * DIM + i, load(acc + g * DIM + i) * (1.0f / state[g].total));
}

}  // namespace

template <class T>
void attend_one(const T* q, const Cache<T>& keys, const Cache<T>& values, int64_t context, int64_t group, int64_t dim, float scale, T* out,
                const Following<T>& next) {
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
        int64_t part = group - g < MAX_GROUP ? group - g : MAX_GROUP;
        const T* from = q + g * dim;
        T* to = out + g * dim;
        switch (dim) {
            case 16: attend<16>(from, keys, values, context, part, scale, to, next); break;
            case 32: attend<32>(from, keys, values, context, part, scale, to, next); break;
            case 64: attend<64>(from, keys, values, context, part, scale, to, next); break;
            case 80: attend<80>(from, keys, values, context, part, scale, to, next); break;
            case 96: attend<96>(from, keys, values, context, part, scale, to, next); break;
            case 128: attend<128>(from, keys, values, context, part, scale, to, next); break;
            case 256: attend<256>(from, keys, values, context, part, scale, to, next); break;
        }
    }
}

template void attend_one(const float*, const Cache<float>&, const Cache<float>&, int64_t, int64_t, int64_t, float, float*,
                         const Following<float>&);
template void attend_one(const bf16*, const Cache<bf16>&, const Cache<bf16>&, int64_t, int64_t, int64_t, float, bf16*,
                         const Following<bf16>&);

namespace {

template <class T>
void decode(const T* q, const T* kv, const int32_t* contexts, const int32_t* tables, T* out, const AttentionShape& s, int threads) {
    int64_t group = s.q_heads / s.kv_heads;
    int64_t items = s.requests * s.kv_heads;
    auto of = [&](int64_t item, int64_t which) { return cache_of(kv, tables, item / s.kv_heads, item % s.kv_heads, which, s); };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < items; ++item) {
        int64_t row = (item / s.kv_heads * s.q_heads + item % s.kv_heads * group) * s.dim;
        Following<T> next{of(least(item + 1, items - 1), 0), item + 1 < items ? contexts[(item + 1) / s.kv_heads] : 0};
        attend_one(q + row, of(item, 0), of(item, 1), contexts[item / s.kv_heads], group, s.dim, s.scale, out + row, next);
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
