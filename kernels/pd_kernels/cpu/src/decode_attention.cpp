// Decode attention: bound by reading the cache once. All query heads of a KV head share each load; softmax is online
// over chunks (Milakov and Gimelshein, 2018), scores and sums in float32.
#include "attention.h"
#include "softmax.h"

namespace pd {
namespace {

// Rows of one kind (keys or values) of one head: where tokens are, plus an offset.
template <class T>
struct Rows {
    const T* const* tokens;
    int64_t offset, count;

    const T* operator[](int64_t t) const { return tokens[t] + offset; }
    Rows from(int64_t t) const { return {tokens + t, offset, count - t}; }
};

template <class T>
void prefetch_row(const T* row, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(row + i);
}
template <class T>
void prefetch_rows(const Rows<T>& rows, int64_t first, int64_t dim) {
    for (int64_t t = first; t < rows.count; ++t) prefetch_row(rows[t], 0, dim);
}

// Scores of 16 rows. Meanwhile elements [from, to) of the rows in `ahead` are fetched: a few lines between products keep memory
// busy, where a burst of them would only stall.
template <int DIM, class T>
f32x16 scores_of_16(const T* q, const Rows<T>& rows, const Rows<T>& ahead, int from, int to) {
    f32x16 acc[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) {
        prefetch_row(ahead[t], from, to);
        const T* row = rows[t];
        f32x16 sum = {};
        int i = 0;
        for (; i + 32 <= DIM; i += 32) sum = dot_pairs(sum, q + i, row + i);
        if (i < DIM) sum = fma(load(q + i), load(row + i), sum);
        acc[t] = sum;
    }
    return sum_each(acc);
}

// acc [group][DIM] += weights [group][CHUNK] x values of `count` rows, while the rows in `ahead` are fetched; float32 weights.
template <int DIM, class T>
void add_values(const Rows<T>& rows, int64_t count, const Rows<T>& ahead, const float* weights, int64_t group, float* acc) {
    alignas(64) float tile[16 * DIM];
    for (int64_t t = 0; t < count; ++t) {
        prefetch_row(ahead[t], 0, DIM);
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
template <int DIM>
void straighten(const void*, float*) {}

#if defined(__AVX512BF16__)
// The same with bf16 weights, two rows at a time: G heads, WIDTH values from each row. Rows come in pairs; the second of an
// odd last pair has weight 0. Pairs are interleaved within 128 bits, so 32 sums stand in the order of `straighten`.
template <int WIDTH>
inline void interleave(const bf16* even, const bf16* odd, __m512bh* pairs) {
    for (int i = 0; i + 32 <= WIDTH; i += 32) {
        __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
        pairs[i / 16] = (__m512bh)_mm512_unpacklo_epi16(a, b);
        pairs[i / 16 + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    if (WIDTH == 16) pairs[0] = (__m512bh)(load_bits(even) | (load_bits(odd) << 16));
}

template <int WIDTH, int G>
void add_pairs(const Rows<bf16>& rows, int64_t count, const Rows<bf16>* ahead, int64_t offset, const bf16* weights, float* acc, int64_t acc_row) {
    constexpr int N = WIDTH / 16;
    f32x16 sums[G][N];
    for (int g = 0; g < G; ++g)
        for (int i = 0; i < N; ++i) sums[g][i] = load(acc + g * acc_row + i * 16);
    for (int64_t t = 0; t < count; t += 2) {
        __m512bh pairs[N];
        if (ahead) prefetch_row((*ahead)[t] + offset, 0, WIDTH), prefetch_row((*ahead)[t + 1] + offset, 0, WIDTH);
        interleave<WIDTH>(rows[t] + offset, rows[t + 1] + offset, pairs);
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
void add_slice(const Rows<bf16>& rows, int64_t count, const Rows<bf16>* ahead, int64_t offset, const bf16* weights, int64_t group, float* acc,
               int64_t acc_row) {
    int64_t g = 0;
    for (; g + 4 <= group; g += 4, ahead = nullptr) add_pairs<WIDTH, 4>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 3) add_pairs<WIDTH, 3>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 2) add_pairs<WIDTH, 2>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
    if (group - g == 1) add_pairs<WIDTH, 1>(rows, count, ahead, offset, weights + g * CHUNK, acc + g * acc_row, acc_row);
}

template <int DIM>
void add_values(const Rows<bf16>& rows, int64_t count, const Rows<bf16>& ahead, const bf16* weights, int64_t group, float* acc) {
    int64_t i = 0;
    for (; i + 64 <= DIM; i += 64) add_slice<64>(rows, count, &ahead, i, weights, group, acc + i, DIM);
    if (DIM % 64 >= 32) add_slice<32>(rows, count, &ahead, i, weights, group, acc + i, DIM), i += 32;
    if (DIM % 32) add_slice<16>(rows, count, &ahead, i, weights, group, acc + i, DIM);
}
// One head's sums into the order of its values.
template <int DIM>
void straighten(const bf16*, float* acc) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i + 32 <= DIM; i += 32) {
        __m512 low = _mm512_loadu_ps(acc + i), high = _mm512_loadu_ps(acc + i + 16);
        _mm512_storeu_ps(acc + i, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(acc + i + 16, _mm512_permutex2var_ps(low, second, high));
    }
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

// Tokens of a chunk, padded to 16 by repeating the last.
template <class T>
struct Chunk {
    const T* tokens[CHUNK + 16];
    int64_t count = 0, padded = 0;

    void read(const Sequence<T>& sequence, int64_t first, int64_t size) {
        count = least(sequence.context - first, size);
        padded = (count + 15) / 16 * 16;
        sequence.rows(first, count, tokens);
        for (int64_t t = count; t < CHUNK + 16; ++t) tokens[t] = tokens[count - 1];
    }
};

// `part` query heads from `q_first` on of every KV head. A chunk's heads follow each other, because a block holds them side by side.
// Memory is read ahead all the time: keys while keys are multiplied, values while values are summed, each for the head after
// this one (of this chunk, of the next, or of the next sequence's first).
template <int DIM, class T>
void attend(const T* q, const Sequence<T>& sequence, const Heads& heads, const AttentionShape& s, int64_t q_first, int64_t part, T* out,
            const Sequence<T>* next) {
    constexpr int LINES = DIM * sizeof(T) / 64 > 0 ? DIM * sizeof(T) / 64 : 1, LINE = 64 / sizeof(T);
    constexpr int64_t SIZE = DIM * sizeof(T) > 256 ? CHUNK / 2 : CHUNK;  // what is read ahead stays in the first cache level
    constexpr int64_t HEADS = 64 / (DIM / 16);                              // KV heads per pass, so that sums fit on the stack
    alignas(64) float scores[MAX_GROUP * CHUNK];
    alignas(64) Weight<T> weights[MAX_GROUP * CHUNK];
    alignas(64) float sums[HEADS * MAX_GROUP * DIM];
    Softmax state[HEADS * MAX_GROUP];
    int64_t group = s.q_heads / s.kv_heads, num_heads = heads.last - heads.first;
    std::memset(sums, 0, sizeof(float) * num_heads * part * DIM);
    Chunk<T> chunks[2];
    chunks[0].read(sequence, 0, SIZE);
    for (int64_t first = 0, turn = 0; first < sequence.context; first += SIZE, turn ^= 1) {
        const Chunk<T>& chunk = chunks[turn];
        Chunk<T>& after = chunks[turn ^ 1];
        if (first + SIZE < sequence.context) {
            after.read(sequence, first + SIZE, SIZE);
        } else if (next) {
            after.read(*next, 0, SIZE);
        } else {
            after = chunk;
        }
        for (int64_t h = 0; h < num_heads; ++h) {
            const Chunk<T>& following = h + 1 < num_heads ? chunk : after;
            int64_t offset = (heads.first + h) * s.head_stride, ahead = (heads.first + (h + 1) % num_heads) * s.head_stride;
            Rows<T> keys{chunk.tokens, offset, chunk.count}, values{chunk.tokens, offset + s.kv_stride, chunk.count};
            Rows<T> next_keys{following.tokens, ahead, following.count}, next_values{following.tokens, ahead + s.kv_stride, following.count};
            const T* queries = q + ((heads.first + h) * group + q_first) * DIM;
            float* acc = sums + h * part * DIM;
            for (int64_t t = 0; t < chunk.padded; t += 16)
                for (int64_t g = 0; g < part; ++g) {
                    int from = static_cast<int>(g * LINES / part) * LINE, to = static_cast<int>((g + 1) * LINES / part) * LINE;
                    store(scores + g * CHUNK + t, scores_of_16<DIM>(queries + g * DIM, keys.from(t), next_keys.from(t), from, to));
                }
            prefetch_rows(next_keys, chunk.padded, DIM);
            for (int64_t g = 0; g < part; ++g) {
                for (int64_t t = chunk.count; t < chunk.padded; ++t) scores[g * CHUNK + t] = MASKED / s.scale;
                float factor = update(state[h * part + g], scores + g * CHUNK, chunk.padded, s.scale, weights + g * CHUNK);
                if (factor != 1.0f)
                    for (int i = 0; i < DIM; i += 16) store(acc + g * DIM + i, load(acc + g * DIM + i) * factor);
            }
            for (int64_t t = 0; t < chunk.count; t += STEP<T>)
                add_values<DIM>(values.from(t), least(chunk.count - t, STEP<T>), next_values.from(t), weights + t, part, acc);
            prefetch_rows(next_values, chunk.count, DIM);
        }
    }
    for (int64_t h = 0; h < num_heads; ++h)
        for (int64_t g = 0; g < part; ++g) {
            float *acc = sums + (h * part + g) * DIM, inverse = 1.0f / state[h * part + g].total;
            T* to = out + ((heads.first + h) * group + q_first + g) * DIM;
            straighten<DIM>(static_cast<const T*>(nullptr), acc);
            for (int i = 0; i < DIM; i += 16) store(to + i, load(acc + i) * inverse);
        }
}

template <int DIM, class T>
void attend_all(const T* q, const Sequence<T>& sequence, const Heads& heads, const AttentionShape& s, T* out, const Sequence<T>* next) {
    constexpr int64_t STEP_HEADS = 64 / (DIM / 16);
    int64_t group = s.q_heads / s.kv_heads;
    for (int64_t h = heads.first; h < heads.last; h += STEP_HEADS)
        for (int64_t g = 0; g < group; g += MAX_GROUP)
            attend<DIM>(q, sequence, {h, least(h + STEP_HEADS, heads.last), false}, s, g, least(group - g, MAX_GROUP), out, next);
}

}  // namespace

inline bool by_tiles(const float*, const Sequence<float>&, const Heads&, const AttentionShape&, float*, const Sequence<float>*) { return false; }
inline bool by_tiles(const bf16* q, const Sequence<bf16>& sequence, const Heads& heads, const AttentionShape& s, bf16* out,
                     const Sequence<bf16>* next) {
    return heads.use_amx && attend_tiles(q, sequence, heads, s, out, next);
}

template <class T>
void attend_one(const T* q, const Sequence<T>& sequence, const Heads& heads, const AttentionShape& s, T* out, const Sequence<T>* next) {
    if (by_tiles(q, sequence, heads, s, out, next)) return;
    switch (s.dim) {
        case 16: return attend_all<16>(q, sequence, heads, s, out, next);
        case 32: return attend_all<32>(q, sequence, heads, s, out, next);
        case 64: return attend_all<64>(q, sequence, heads, s, out, next);
        case 80: return attend_all<80>(q, sequence, heads, s, out, next);
        case 96: return attend_all<96>(q, sequence, heads, s, out, next);
        case 128: return attend_all<128>(q, sequence, heads, s, out, next);
        case 256: return attend_all<256>(q, sequence, heads, s, out, next);
    }
}

template void attend_one(const float*, const Sequence<float>&, const Heads&, const AttentionShape&, float*, const Sequence<float>*);
template void attend_one(const bf16*, const Sequence<bf16>&, const Heads&, const AttentionShape&, bf16*, const Sequence<bf16>*);

namespace {

// A thread takes whole sequences, or single heads where there are fewer sequences than threads.
template <class T>
void decode(const T* q, const T* kv, const int32_t* contexts, const int32_t* tables, T* out, const AttentionShape& s, bool use_amx,
            int threads) {
    int64_t splits = s.requests >= threads ? 1 : s.kv_heads, items = s.requests * splits, row = s.q_heads * s.dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < items; ++item) {
        int64_t r = item / splits, after = (item + 1) / splits, first = item % splits;
        Heads heads{first, splits == 1 ? s.kv_heads : first + 1, use_amx};
        Sequence<T> sequence = sequence_of(kv, tables, r, contexts[r], s), next = sequence;
        if (after > r && after < s.requests) next = sequence_of(kv, tables, after, contexts[after], s);
        attend_one(q + r * row, sequence, heads, s, out + r * row, after > r && after < s.requests ? &next : nullptr);
    }
}

}  // namespace
}  // namespace pd

extern "C" void pd_decode_attention(int is_bf16, int use_amx, const void* q, const void* kv, const int32_t* contexts, const int32_t* tables,
                                    void* out, const pd::AttentionShape* shape, int threads) {
    using pd::bf16;
    if (is_bf16) {
        pd::decode(static_cast<const bf16*>(q), static_cast<const bf16*>(kv), contexts, tables, static_cast<bf16*>(out), *shape, use_amx != 0,
                   threads);
    } else {
        pd::decode(static_cast<const float*>(q), static_cast<const float*>(kv), contexts, tables, static_cast<float*>(out), *shape, false,
                   threads);
    }
}
