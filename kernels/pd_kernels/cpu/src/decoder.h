// One step through all layers, as Python describes it. The structs are mirrored in fused.py, field by field.
#pragma once
#include "attention.h"
#include "rope.h"

namespace pd {

struct LinearPart {
    enum Kind : int64_t { TILES, INT8_TILES, ROWS, INT8_ROWS };
    int64_t kind;
    const void* weight;
    const float* scale;  // of int8 weights
    const float* bias;   // may be null
    int64_t n, k;
};

struct LayerPart {
    LinearPart qkv, output, gate_up, down;
    const void *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
    float qk_eps;
};

struct DecoderStep {
    int64_t is_bf16, use_amx, threads, num_layers, rows, num_decode;  // decode rows come first
    int64_t num_sampled;                                              // -1: all rows
    int64_t hidden, q_size, inner, layer_stride, block_rows;
    float eps;
    const LayerPart* layers;
    const void* final_norm;
    const float* rope;
    const int64_t *slots, *sampled;
    void* kv;  // of layer 0; the next layer's is layer_stride elements further
    const int32_t *decode_contexts, *decode_tables, *query_start, *prefill_contexts, *prefill_tables;
    RopeShape rope_shape;
    AttentionShape decode, prefill;
    void *residual, *normed, *qkv, *q, *mixed;    // for all rows; the result is in normed
    void *projected, *gate_up, *inner_rows;       // for a block of rows, of each thread
};

}  // namespace pd
