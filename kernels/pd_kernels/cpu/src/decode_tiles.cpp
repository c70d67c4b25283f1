// Decode attention by AMX: keys are loaded as tiles from where they lie, 16 tokens each; only values are interleaved first.
// All KV heads of a chunk are walked together, first keys, then values, because a block holds them side by side; what follows is
// fetched into the first cache level in that order, a few lines at a time (bursts, or the second level, leave memory idle).
#include "amx.h"
#include "attention.h"
#include "softmax.h"

namespace pd {

#if defined(PD_HAS_AMX)
namespace {

constexpr int64_t TILES = CHUNK / 16;  // tiles of tokens in a chunk

// Tiles 0-2 hold scores [16 tokens][group] and queries [32 of depth][group], 3-5 keys or values, 6 sums [group][16], 7 weights
// [group][32].
void configure(int group) {
    amx::Config config;
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = static_cast<uint8_t>(t < 6 ? 16 : group);
        config.row_bytes[t] = static_cast<uint16_t>(t < 3 ? 4 * group : 64);
    }
    _tile_loadconfig(&config);
}

// First keys of the tiles of tokens of one chunk.
struct Chunk {
    const bf16* tiles[TILES];
    int64_t count = 0, num_tiles = 0;

    void read(const Sequence<bf16>& sequence, int64_t first) {
        count = least(sequence.context - first, CHUNK);
        num_tiles = (count + 15) / 16;
        for (int64_t i = 0; i < num_tiles; ++i) sequence.rows(first + i * 16, 1, tiles + i);
    }
};

// The order of reading: a unit is the keys, later the values, of one tile of tokens and one head.
struct Order {
    const Heads& heads;
    const AttentionShape& s;
    int64_t num_heads = heads.last - heads.first;

    int64_t units(const Chunk& chunk) const { return 2 * num_heads * chunk.num_tiles; }
    const bf16* at(const Chunk& chunk, int64_t unit) const {
        int64_t half = units(chunk) / 2, of_kind = unit % half;
        return chunk.tiles[of_kind / num_heads] + (unit < half ? 0 : s.kv_stride) + (heads.first + of_kind % num_heads) * s.head_stride;
    }
};

// Keys and values of a whole chunk on their way into the second cache level while the chunk before is computed: block after block in
// the order of memory, one line in four: the machine's own prefetching brings the others.
struct Far {
    const Order& order;
    const Chunk* chunk = nullptr;
    int64_t limit = 0, unit = 0, element = 0;
    const bf16* from = nullptr;

    void enter(const Chunk& following) {
        chunk = &following, unit = 0, limit = 0;
        find();
    }
    void find() {
        element = 0;
        int64_t of_tile = 2 * order.num_heads, rest = unit % of_tile;
        from = unit < order.units(*chunk) ? chunk->tiles[unit / of_tile] + (rest < order.num_heads ? 0 : order.s.kv_stride) +
                                                (order.heads.first + rest % order.num_heads) * order.s.head_stride
                                          : nullptr;
    }
    void four() {
        if (unit >= limit || !from) return;
        __builtin_prefetch(from + element, 0, 2);
        element += 128;
        if (element >= 16 * order.s.dim) ++unit, find();
    }
};

// The near end: into the first cache level, in the order of use, at most AHEAD bytes before it.
struct Near {
    static constexpr int64_t AHEAD = 8192;
    const Order& order;
    const Chunk *chunk = nullptr, *after = nullptr;
    int64_t lead = AHEAD / (32 * order.s.dim) > 2 ? AHEAD / (32 * order.s.dim) : 2, limit = 0;  // units
    int64_t unit = 0, element = 0;                                                                // the next line
    const bf16* from = nullptr;

    void enter(const Chunk& current, const Chunk& following) {
        if (chunk) unit = unit > order.units(*chunk) ? unit - order.units(*chunk) : 0;
        chunk = &current, after = &following;
        find();
    }
    void find() {
        element = 0;
        int64_t here = order.units(*chunk);
        from = unit < here ? order.at(*chunk, unit) : unit < here + order.units(*after) ? order.at(*after, unit - here) : nullptr;
    }
    void four() {
        if (unit >= limit || !from) return;
        for (int64_t i = 0; i < 128; i += 32) prefetch(from + element + i);
        element += 128;
        if (element >= 16 * order.s.dim) ++unit, find();
    }
};

struct Fetch {
    Far far;
    Near near;
    void enter(const Chunk& current, const Chunk& following) { far.enter(following), near.enter(current, following); }
    void used(int64_t units) { far.limit = units + 2, near.limit = units + near.lead; }
    void four() { far.four(), near.four(); }
};

// 32 rows of values -> tiles of 16 columns. Pairs of rows are interleaved within 128 bits, so columns stand in the order of `straighten`.
template <int DIM>
void interleave(const bf16* const* tiles, int64_t offset, int64_t count, bf16* to, Fetch& fetch) {
    for (int64_t t = 0; t < 32; t += 2) {
        for (int i = 0; i < DIM; i += 64) fetch.four();
        int64_t even = least(t, count - 1), odd = least(t + 1, count - 1);  // weights of rows past `count` are 0, so any row will do
        const bf16* a = tiles[even / 16] + offset + even % 16 * DIM;
        const bf16* b = tiles[odd / 16] + offset + odd % 16 * DIM;
        for (int i = 0; i < DIM; i += 32) {
            __m512i left = _mm512_loadu_si512(a + i), right = _mm512_loadu_si512(b + i);
            _mm512_store_si512(to + i / 16 * amx::TILE + t * 16, _mm512_unpacklo_epi16(left, right));
            _mm512_store_si512(to + (i / 16 + 1) * amx::TILE + t * 16, _mm512_unpackhi_epi16(left, right));
        }
    }
}

inline void straighten(float* acc, int64_t dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t i = 0; i < dim; i += 32) {
        __m512 low = _mm512_loadu_ps(acc + i), high = _mm512_loadu_ps(acc + i + 16);
        _mm512_storeu_ps(acc + i, _mm512_permutex2var_ps(low, first, high));
        _mm512_storeu_ps(acc + i + 16, _mm512_permutex2var_ps(low, second, high));
    }
}

template <int DIM>
struct Work {  // of one KV head of one sequence
    alignas(64) bf16 queries[DIM / 32][amx::TILE];  // [32 of depth in pairs][group]
    alignas(64) float acc[MAX_GROUP][DIM];
    alignas(64) float raw[CHUNK * MAX_GROUP];  // [tokens][group]
    alignas(64) bf16 weights[MAX_GROUP * CHUNK];
    Softmax state[MAX_GROUP];
};

template <int DIM>
void multiply_keys(const bf16* keys, const Work<DIM>& work, int64_t group, float* raw, Fetch& fetch) {
    _tile_zero(0);
    for (int i = 0; i < DIM / 32; ++i) {
        if (i % 2 == 0) {
            _tile_loadd(1, work.queries[i], 4 * group);
            _tile_loadd(3, keys + i * 32, DIM * 2);
            _tile_dpbf16ps(0, 3, 1);
        } else {
            _tile_loadd(2, work.queries[i], 4 * group);
            _tile_loadd(4, keys + i * 32, DIM * 2);
            _tile_dpbf16ps(0, 4, 2);
        }
        for (int j = 0; j < 4; ++j) fetch.four();
    }
    _tile_stored(0, raw, 4 * group);
}

// Scores of `count` tokens, padded to 32, -> weights; sums so far are rescaled.
template <int DIM>
void weigh(Work<DIM>& work, int64_t count, int64_t group, float scale, Fetch& fetch) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    __m512i column = reinterpret_cast<__m512i>(lane * static_cast<int32_t>(group));
    alignas(64) float scores[CHUNK];
    int64_t padded = (count + 31) / 32 * 32;
    for (int64_t g = 0; g < group; ++g) {
        for (int64_t t = 0; t < padded; t += 16) {
            f32x16 value = reinterpret_cast<f32x16>(_mm512_i32gather_ps(column, work.raw + t * group + g, 4));
            store(scores + t, lane < static_cast<int32_t>(count - t) ? value : splat(MASKED) / scale);
        }
        float factor = update(work.state[g], scores, padded, scale, work.weights + g * CHUNK);
        fetch.four();
        if (factor != 1.0f)
            for (int i = 0; i < DIM; i += 16) store(work.acc[g] + i, load(work.acc[g] + i) * factor);
    }
}

// Adds 32 tokens from `first` on.
template <int DIM>
void add_values(const bf16* values, Work<DIM>& work, int64_t first) {
    _tile_loadd(7, work.weights + first, CHUNK * 2);
    for (int i = 0; i < DIM / 16; ++i) {
        _tile_loadd(6, work.acc[0] + i * 16, DIM * 4);
        _tile_loadd(5, values + i * amx::TILE, 64);
        _tile_dpbf16ps(6, 7, 5);
        _tile_stored(6, work.acc[0] + i * 16, DIM * 4);
    }
}

template <int DIM>
void add_chunk(const Chunk& chunk, const Heads& heads, const AttentionShape& s, int64_t group, Work<DIM>* works, Fetch& fetch) {
    alignas(64) bf16 values[DIM / 16 * amx::TILE];
    int64_t num_heads = heads.last - heads.first, units = 0;
    for (int64_t t = 0; t < chunk.num_tiles; ++t)
        for (int64_t h = 0; h < num_heads; ++h) {
            fetch.used(units++);
            multiply_keys(chunk.tiles[t] + (heads.first + h) * s.head_stride, works[h], group, works[h].raw + t * 16 * group, fetch);
        }
    for (int64_t h = 0; h < num_heads; ++h) weigh(works[h], chunk.count, group, s.scale, fetch);
    for (int64_t t = 0; t < chunk.num_tiles; t += 2)
        for (int64_t h = 0; h < num_heads; ++h) {
            fetch.used(units += 2);
            interleave<DIM>(chunk.tiles + t, (heads.first + h) * s.head_stride + s.kv_stride, chunk.count - t * 16, values, fetch);
            add_values(values, works[h], t * 16);
        }
}

template <int DIM>
void attend(const bf16* q, const Sequence<bf16>& sequence, const Heads& heads, const AttentionShape& s, int64_t q_first, int64_t part, bf16* out,
            const Sequence<bf16>* next) {
    constexpr int64_t MOST = 8;  // KV heads per pass, so that sums fit on the stack
    int64_t group = s.q_heads / s.kv_heads;
    Work<DIM> works[MOST];
    for (int64_t begin = heads.first; begin < heads.last; begin += MOST) {
        Heads those{begin, least(begin + MOST, heads.last), true};
        int64_t num_heads = those.last - those.first;
        for (int64_t h = 0; h < num_heads; ++h) {
            Work<DIM>& work = works[h];
            for (int64_t g = 0; g < part; ++g) {
                const bf16* row = q + ((begin + h) * group + q_first + g) * DIM;
                for (int i = 0; i < DIM; i += 2) std::memcpy(work.queries[i / 32] + i % 32 / 2 * 2 * part + g * 2, row + i, 4);
                work.state[g] = Softmax{};
                std::memset(work.acc[g], 0, sizeof(work.acc[g]));
            }
        }
        Order order{those, s};
        Fetch fetch{{order}, {order}};
        Chunk chunks[2];
        chunks[0].read(sequence, 0);
        for (int64_t first = 0, turn = 0; first < sequence.context; first += CHUNK, turn ^= 1) {
            Chunk& after = chunks[turn ^ 1];
            after.num_tiles = 0;
            if (first + CHUNK < sequence.context) {
                after.read(sequence, first + CHUNK);
            } else if (next) {
                after.read(*next, 0);
            }
            fetch.enter(chunks[turn], after);
            add_chunk(chunks[turn], those, s, part, works, fetch);
        }
        for (int64_t h = 0; h < num_heads; ++h)
            for (int64_t g = 0; g < part; ++g) {
                float *acc = works[h].acc[g], inverse = 1.0f / works[h].state[g].total;
                straighten(acc, DIM);
                bf16* to = out + ((begin + h) * group + q_first + g) * DIM;
                for (int i = 0; i < DIM; i += 16) store(to + i, load(acc + i) * inverse);
            }
    }
}

}  // namespace

bool attend_tiles(const bf16* q, const Sequence<bf16>& sequence, const Heads& heads, const AttentionShape& s, bf16* out,
                  const Sequence<bf16>* next) {
    if (s.block_size % 16 || s.token_stride != s.dim || s.dim % 32) return false;
    int64_t group = s.q_heads / s.kv_heads;
    for (int64_t g = 0; g < group; g += MAX_GROUP) {
        int64_t part = least(group - g, MAX_GROUP);
        configure(static_cast<int>(part));
        switch (s.dim) {
            case 32: attend<32>(q, sequence, heads, s, g, part, out, next); break;
            case 64: attend<64>(q, sequence, heads, s, g, part, out, next); break;
            case 96: attend<96>(q, sequence, heads, s, g, part, out, next); break;
            case 128: attend<128>(q, sequence, heads, s, g, part, out, next); break;
            case 256: attend<256>(q, sequence, heads, s, g, part, out, next); break;
            default: amx::release(); return false;
        }
    }
    amx::release();
    return true;
}
#else
bool attend_tiles(const bf16*, const Sequence<bf16>&, const Heads&, const AttentionShape&, bf16*, const Sequence<bf16>*) { return false; }
#endif

}  // namespace pd
