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
struct Cache {  // keys or values of one sequence and one head
    const T* base;
    const int32_t* table;
    int64_t block_size, block_stride, token_stride;

    // Row pointers of `count` tokens from `first` on.
    void rows(int64_t first, int64_t count, const T** out) const {
        int64_t block = first / block_size, offset = first % block_size;
        while (count > 0) {
            const T* row = base + static_cast<int64_t>(table[block]) * block_stride + offset * token_stride;
            int64_t run = block_size - offset < count ? block_size - offset : count;
            for (int64_t i = 0; i < run; ++i, row += token_stride) *out++ = row;
            count -= run;
            ++block;
            offset = 0;
        }
    }
};

template <class T>
Cache<T> cache_of(const T* kv, const int32_t* tables, int64_t request, int64_t head, int64_t which, const AttentionShape& s) {
    return {kv + which * s.kv_stride + head * s.head_stride, tables + request * s.table_row, s.block_size, s.block_stride, s.token_stride};
}

template <class T>
struct Following {  // what will be read next: its first keys are fetched ahead
    Cache<T> keys;
    int64_t context;  // 0: nothing is known
};

// Attention of one token's query heads that share a KV head: q and out are [q_heads / kv_heads][dim].
template <class T>
void attend_one(const T* q, const Cache<T>& keys, const Cache<T>& values, int64_t context, int64_t group, int64_t dim, float scale, T* out,
                const Following<T>& next);

extern template void attend_one(const float*, const Cache<float>&, const Cache<float>&, int64_t, int64_t, int64_t, float, float*,
                                const Following<float>&);
extern template void attend_one(const bf16*, const Cache<bf16>&, const Cache<bf16>&, int64_t, int64_t, int64_t, float, bf16*,
                                const Following<bf16>&);

}  // namespace pd
