// Prefill attention: bound by arithmetic. Rows are (token, query head of the group) pairs, so grouped queries share keys and
// values; 256 keys at a time are packed once and meet every tile of 32 rows; softmax is online over those blocks (Dao et al., 2022).
// Two engines: AMX tiles for bf16, float32 multiply-adds for everything else.
#include "amx.h"
#include "attention.h"

#include <algorithm>
#include <vector>

namespace pd {
namespace {

constexpr int64_t KEYS = 256;     // keys per block
constexpr int64_t TILE_ROWS = 32;
constexpr int64_t ITEM_ROWS = 1024;  // rows per unit of work: the packed keys of a block are used this often
constexpr float MASKED = -1e30f;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// An engine multiplies A [32][depth] by B, packed in pairs of panels of 16 columns, into c [32][columns]; `pair` is the distance
// of two pairs in elements.
struct FloatEngine {
    using Operand = float;
    static constexpr bool IS_AMX = false;
    static constexpr int64_t DEPTH = 16;
    static void begin() {}
    static void end() {}

    // rows[n] are the columns of B.
    template <class T>
    static void pack_columns(const T* const* rows, int64_t n, int64_t padded, int64_t depth, int64_t padded_depth, float* b) {
        std::memset(b, 0, sizeof(float) * padded * padded_depth);
        for (int64_t j = 0; j < n; ++j) {
            float* panel = b + j / 16 * 16 * padded_depth + j % 16;
            for (int64_t d = 0; d < depth; ++d) panel[d * 16] = to_float(rows[j][d]);
        }
    }
    // rows[k] are the rows of B, n wide.
    template <class T>
    static void pack_rows(const T* const* rows, int64_t k, int64_t padded, int64_t n, int64_t padded_n, float* b) {
        for (int64_t j = 0; j < padded_n; j += 16)
            for (int64_t t = 0; t < padded; ++t, b += 16) store(b, t < k && j < n ? load(rows[t] + j) : f32x16{});
    }
    static void multiply(const float* a, int64_t a_row, const float* b, int64_t pair, int64_t depth, float* c, int64_t c_row,
                         int64_t columns, bool accumulate) {
        for (int64_t j = 0; j < columns; j += 32, b += pair)
            for (int64_t r = 0; r < TILE_ROWS; r += 8)
                block(a + r * a_row, a_row, b, b + pair / 2, depth, c + r * c_row + j, c_row, accumulate);
    }
    static void block(const float* a, int64_t a_row, const float* b0, const float* b1, int64_t depth, float* c, int64_t c_row, bool accumulate) {
        f32x16 x[8] = {}, y[8] = {};
        for (int64_t k = 0; k < depth; ++k) {
            f32x16 left = load(b0 + k * 16), right = load(b1 + k * 16);
            for (int r = 0; r < 8; ++r) {
                f32x16 value = splat(a[r * a_row + k]);
                x[r] = fma(value, left, x[r]);
                y[r] = fma(value, right, y[r]);
            }
        }
        for (int r = 0; r < 8; ++r) {
            store(c + r * c_row, accumulate ? x[r] + load(c + r * c_row) : x[r]);
            store(c + r * c_row + 16, accumulate ? y[r] + load(c + r * c_row + 16) : y[r]);
        }
    }
};

#if defined(PD_HAS_AMX)
struct AmxEngine {
    using Operand = bf16;
    static constexpr bool IS_AMX = true;
    static constexpr int64_t DEPTH = 32;
    static void begin() { amx::configure(16, 16); }
    static void end() { amx::release(); }

    static void pack_columns(const bf16* const* rows, int64_t n, int64_t padded, int64_t depth, int64_t padded_depth, bf16* b) {
        for (int64_t j = 0; j < padded; j += 16)
            for (int64_t d = 0; d < padded_depth; d += 32) {
                __m512i pairs[16];
                __mmask16 used = depth - d < 32 ? 0xff : 0xffff;  // depth is a multiple of 16
                for (int64_t i = 0; i < 16; ++i)
                    pairs[i] = j + i < n ? _mm512_maskz_loadu_epi32(used, rows[j + i] + d) : _mm512_setzero_si512();
                amx::transpose(pairs);
                bf16* tile = b + j / 32 * 32 * padded_depth + d / 32 * 2 * amx::TILE + j % 32 / 16 * amx::TILE;
                for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * 32, pairs[i]);
            }
    }
    static void pack_rows(const bf16* const* rows, int64_t k, int64_t padded, int64_t n, int64_t padded_n, bf16* b) {
        for (int64_t t = 0; t < padded; t += 2)
            for (int64_t j = 0; j < padded_n; j += 16) {
                u32x16 even = t < k && j < n ? load_bits(rows[t] + j) : u32x16{};
                u32x16 odd = t + 1 < k && j < n ? load_bits(rows[t + 1] + j) : u32x16{};
                u32x16 both = even | (odd << 16);
                std::memcpy(b + j / 32 * 32 * padded + t / 32 * 2 * amx::TILE + j % 32 / 16 * amx::TILE + t % 32 * 16, &both, 64);
            }
    }
    static void multiply(const bf16* a, int64_t a_row, const bf16* b, int64_t pair, int64_t depth, float* c, int64_t c_row,
                         int64_t columns, bool accumulate) {
        for (int64_t j = 0; j < columns; j += 32, b += pair) amx::multiply_2x2(a, a_row, b, depth / 32, c + j, c_row, accumulate, [](int64_t) {});
    }
};
#endif

template <class E>
struct Scratch {  // of one thread, kept between calls
    using Operand = typename E::Operand;
    std::vector<Operand> q, k, v;
    std::vector<float> acc, highest, total;
    alignas(64) float scores[TILE_ROWS * KEYS];
    alignas(64) Operand weights[TILE_ROWS * KEYS];
    const void* rows[KEYS];

    void resize(int64_t num_rows, int64_t depth, int64_t width) {
        q.assign(num_rows * depth, Operand{});
        k.resize(KEYS * depth);
        v.resize(KEYS * width);
        acc.assign(num_rows * width, 0.0f);
        highest.assign(num_rows, MASKED);
        total.assign(num_rows, 0.0f);
    }
};

const i32x16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline f32x16 mask_from(f32x16 scores, int64_t visible) { return LANE < static_cast<int32_t>(visible) ? scores : splat(MASKED); }

// exp(score * scale - best) of one row's first `visible` scores, 0 for the rest of `columns`; returns the lanes' sums. As exact as
// `exp` where weights stay float32.
template <class Operand>
struct Exponential {
    static f32x16 weigh(const float* scores, int64_t visible, int64_t columns, float scale, float best, Operand* weights) {
        f32x16 sums = {}, offset = splat(-best);
        for (int64_t j = 0; j < columns; j += 16) {
            f32x16 score = j + 16 <= visible ? load(scores + j) : mask_from(load(scores + j), visible - j);
            f32x16 weight = exp(fma(score, splat(scale), offset));
            store(weights + j, weight);
            sums += weight;
        }
        return sums;
    }
};

#if defined(PD_HAS_AMX)
// Weights that are rounded to bf16, 4e-3 apart: 2^t = 2^floor(t) * p(t - floor(t)), p the cubic of least relative error, 1e-4.
template <>
struct Exponential<bf16> {
    static __m512 of(f32x16 scores, f32x16 scale, f32x16 offset) {
        __m512 t = reinterpret_cast<__m512>(max(fma(scores, scale, offset), splat(-125.0f)));  // no lane becomes a slow denormal
        f32x16 r = reinterpret_cast<f32x16>(_mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
        f32x16 p = fma(splat(C3), r, splat(C2));
        p = fma(p, r, splat(C1));
        p = fma(p, r, splat(C0));
        return _mm512_scalef_ps(reinterpret_cast<__m512>(p), t);
    }
    static f32x16 weigh(const float* scores, int64_t visible, int64_t columns, float scale, float best, bf16* weights) {
        f32x16 left = {}, right = {}, factor = splat(scale * LOG2_E), offset = splat(-best * LOG2_E);
        int64_t j = 0;
        auto step = [&](f32x16 a, f32x16 b) {
            __m512 x = of(a, factor, offset), y = of(b, factor, offset);
            left += reinterpret_cast<f32x16>(x), right += reinterpret_cast<f32x16>(y);
            __m512bh both = _mm512_cvtne2ps_pbh(y, x);
            std::memcpy(weights + j, &both, 64);
        };
        for (; j + 32 <= visible; j += 32) step(load(scores + j), load(scores + j + 16));
        if (j < columns) {
            step(mask_from(load(scores + j), visible - j), mask_from(load(scores + j + 16), visible - j - 16)), j += 32;
            for (; j < columns; j += 32) std::memset(weights + j, 0, 64);
        }
        return left + right;
    }
    static constexpr float LOG2_E = 1.44269504f, C0 = 0.99992522f, C1 = 0.69583353f, C2 = 0.22606716f, C3 = 0.07802452f;
};
#endif

// Sixteen rows of scores -> weights, row r against its first visible[r] keys; the rest up to `columns` becomes 0.
// `highest` and `total` are the rows' running maximum and sum, `acc` [16][width] what was accumulated before.
template <class Operand>
void softmax_rows(const float* scores, const int64_t* visible, int64_t columns, float scale, float* highest, float* total,
                  Operand* weights, float* acc, int64_t width) {
    f32x16 rows[16];
    for (int r = 0; r < 16; ++r) {
        const float* row = scores + r * KEYS;
        f32x16 top = splat(MASKED);
        int64_t j = 0;
        for (; j + 16 <= visible[r]; j += 16) top = max(top, load(row + j));
        rows[r] = j < visible[r] ? max(top, mask_from(load(row + j), visible[r] - j)) : top;
    }
    f32x16 before = load(highest), best = max(highest_each(rows) * scale, before), factor = exp(before - best);
    store(highest, best);
    for (int r = 0; r < 16; ++r) {
        rows[r] = Exponential<Operand>::weigh(scores + r * KEYS, visible[r], columns, scale, best[r], weights + r * KEYS);
        if (factor[r] != 1.0f)
            for (int64_t d = 0; d < width; d += 16) store(acc + r * width + d, load(acc + r * width + d) * factor[r]);
    }
    store(total, load(total) * factor + sum_each(rows));
}

struct Item {  // rows of one request and one KV head
    int64_t request, head, first_token, num_tokens;  // tokens of the flat batch
    int64_t first_position;                          // of first_token in its sequence
};

template <class E, class T>
void attend_item(const T* q, const T* kv, const int32_t* tables, T* out, const AttentionShape& s, const Item& item, Scratch<E>& scratch) {
    int64_t group = s.q_heads / s.kv_heads, rows = item.num_tokens * group, padded_rows = round_up(rows, TILE_ROWS);
    int64_t depth = round_up(s.dim, E::DEPTH), width = round_up(s.dim, 32);
    scratch.resize(padded_rows, depth, width);
    int64_t q_row = s.q_heads * s.dim, first = item.first_token * q_row + item.head * group * s.dim;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < s.dim; d += 16)
            store(scratch.q.data() + r * depth + d, load(q + first + r / group * q_row + r % group * s.dim + d));
    Sequence<T> keys = sequence_of(kv + item.head * s.head_stride, tables, item.request, 0, s), values = keys;
    values.kv += s.kv_stride;
    const T** pointers = reinterpret_cast<const T**>(scratch.rows);
    int64_t context = item.first_position + item.num_tokens;
    for (int64_t k0 = 0; k0 < context; k0 += KEYS) {
        int64_t count = std::min(KEYS, context - k0), padded = round_up(count, 32);
        keys.rows(k0, count, pointers);
        E::pack_columns(pointers, count, padded, s.dim, depth, scratch.k.data());
        values.rows(k0, count, pointers);
        E::pack_rows(pointers, count, padded, s.dim, width, scratch.v.data());
        for (int64_t r0 = 0; r0 < rows; r0 += TILE_ROWS) {
            int64_t last = item.first_position + (std::min(r0 + TILE_ROWS, rows) - 1) / group;
            if (last < k0) continue;
            int64_t columns = std::min(padded, round_up(last - k0 + 1, 32));
            E::multiply(scratch.q.data() + r0 * depth, depth, scratch.k.data(), 32 * depth, depth, scratch.scores, KEYS, columns, false);
            for (int64_t half = r0; half < r0 + TILE_ROWS; half += 16) {
                int64_t visible[16];
                for (int64_t r = 0; r < 16; ++r) {
                    int64_t position = item.first_position + std::min(half + r, rows - 1) / group;
                    visible[r] = std::min(count, std::max<int64_t>(0, position - k0 + 1));
                }
                softmax_rows(scratch.scores + (half - r0) * KEYS, visible, columns, s.scale, scratch.highest.data() + half,
                             scratch.total.data() + half, scratch.weights + (half - r0) * KEYS, scratch.acc.data() + half * width, width);
            }
            E::multiply(scratch.weights, KEYS, scratch.v.data(), 32 * padded, columns, scratch.acc.data() + r0 * width, width, width, true);
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t d = 0; d < s.dim; d += 16)
            store(out + first + r / group * q_row + r % group * s.dim + d,
                  load(scratch.acc.data() + r * width + d) * (1.0f / scratch.total[r]));
}

std::vector<Item> split(const int32_t* query_start, const int32_t* contexts, const AttentionShape& s) {
    std::vector<Item> items;
    int64_t step = std::max<int64_t>(1, ITEM_ROWS / (s.q_heads / s.kv_heads));
    for (int64_t r = 0; r < s.requests; ++r) {
        int64_t begin = query_start[r], end = query_start[r + 1], offset = contexts[r] - end;
        for (int64_t head = 0; head < s.kv_heads; ++head)
            for (int64_t t = begin; t < end; t += step) items.push_back({r, head, t, std::min(step, end - t), t + offset});
    }
    return items;
}

template <class E, class T>
void prefill(const T* q, const T* kv, const int32_t* query_start, const int32_t* contexts, const int32_t* tables, T* out,
             const AttentionShape& s, int threads) {
    std::vector<Item> items = split(query_start, contexts, s);
    int64_t group = s.q_heads / s.kv_heads, num_items = static_cast<int64_t>(items.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local Scratch<E> scratch;
        E::begin();
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_items; ++i) {
            const Item& item = items[i];
            if (item.num_tokens * group > 16) {
                attend_item<E, T>(q, kv, tables, out, s, item, scratch);
                continue;
            }
            for (int64_t t = 0; t < item.num_tokens; ++t) {  // a few rows: packing the context would cost more than it saves
                int64_t row = (item.first_token + t) * s.q_heads * s.dim;
                Sequence<T> sequence = sequence_of(kv, tables, item.request, item.first_position + t + 1, s);
                attend_one<T>(q + row, sequence, {item.head, item.head + 1, E::IS_AMX}, s, out + row, nullptr);
            }
            E::begin();  // a few rows took the tiles
        }
        E::end();
    }
}

}  // namespace
}  // namespace pd

extern "C" void pd_prefill_attention(int is_bf16, int use_amx, const void* q, const void* kv, const int32_t* query_start,
                                     const int32_t* contexts, const int32_t* tables, void* out, const pd::AttentionShape* shape, int threads) {
    using namespace pd;
    if (!is_bf16) {
        prefill<FloatEngine>(static_cast<const float*>(q), static_cast<const float*>(kv), query_start, contexts, tables,
                             static_cast<float*>(out), *shape, threads);
        return;
    }
#if defined(PD_HAS_AMX)
    if (use_amx) {
        prefill<AmxEngine>(static_cast<const bf16*>(q), static_cast<const bf16*>(kv), query_start, contexts, tables,
                           static_cast<bf16*>(out), *shape, threads);
        return;
    }
#endif
    prefill<FloatEngine>(static_cast<const bf16*>(q), static_cast<const bf16*>(kv), query_start, contexts, tables,
                         static_cast<bf16*>(out), *shape, threads);
}
