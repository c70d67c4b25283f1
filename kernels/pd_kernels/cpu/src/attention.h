// The paged cache as both attention kernels see it: strides of one layer's view, block tables, lengths.
// Block ids are widened to int64 before they are multiplied; rows past a context are never read.
#pragma once
#include "simd.h"

namespace pd {

struct AttentionShape {
    int64_t requests, q_heads, kv_heads, dim, block_size, table_row;
    int64_t block_stride, kv_stride, head_stride, token_stride;  // of kv, in elements
    float scale;
};

template <class T>
struct Sequence {  // the cache of one request; heads and values are offsets from a token's first key
    const T* kv;
    const int32_t* table;
    int64_t context, block_size, block_stride, token_stride;

    // Where `count` tokens from `first` on have the key of head 0.
    void rows(int64_t first, int64_t count, const T** out) const {
        int64_t block = first / block_size, offset = first % block_size;
        while (count > 0) {
            const T* row = kv + static_cast<int64_t>(table[block]) * block_stride + offset * token_stride;
            int64_t run = block_size - offset < count ? block_size - offset : count;
            for (int64_t i = 0; i < run; ++i, row += token_stride) *out++ = row;
            count -= run;
            ++block;
            offset = 0;
        }
    }
};

template <class T>
Sequence<T> sequence_of(const T* kv, const int32_t* tables, int64_t request, int64_t context, const AttentionShape& s) {
    return {kv, tables + request * s.table_row, context, s.block_size, s.block_stride, s.token_stride};
}

struct Heads {  // KV heads [first, last)
    int64_t first, last;
    bool use_amx;  // the process may use tiles
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Attention of one token of `sequence`: q and out are [q_heads][dim], of which those of `heads` are read and written. What will
// be read next, `next`, may be null: its first keys and values are fetched ahead.
template <class T>
void attend_one(const T* q, const Sequence<T>& sequence, const Heads& heads, const AttentionShape& s, T* out, const Sequence<T>* next);

extern template void attend_one(const float*, const Sequence<float>&, const Heads&, const AttentionShape&, float*, const Sequence<float>*);
extern template void attend_one(const bf16*, const Sequence<bf16>&, const Heads&, const AttentionShape&, bf16*, const Sequence<bf16>*);

// The same by AMX tiles; false where shapes or the machine do not allow it, and then nothing was done. Leaves tiles unconfigured.
bool attend_tiles(const bf16* q, const Sequence<bf16>& sequence, const Heads& heads, const AttentionShape& s, bf16* out,
                  const Sequence<bf16>* next);

}  // namespace pd
