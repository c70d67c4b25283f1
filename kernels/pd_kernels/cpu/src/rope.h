// The shape of a rotation that writes into the cache; mirrored in library.py.
#pragma once
#include <cstdint>

namespace pd {

struct RopeShape {
    int64_t tokens, q_heads, kv_heads, dim, block_size;
    int64_t block_stride, kv_stride, head_stride, token_stride;  // of kv, in elements
};

}  // namespace pd
