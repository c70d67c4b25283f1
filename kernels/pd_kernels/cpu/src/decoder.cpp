// All layers of a decoder in one call: the same kernels in the same order as from Python, without what lies between the calls.
// Rows pass from attention to the next norm in blocks, so that the wide activations of a block stay in the second cache level.
#include "decoder.h"

#include <omp.h>

#include <algorithm>

extern "C" {
void pd_rms_norm(int is_bf16, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t n, float eps);
void pd_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t inner);
void pd_rope_write(int is_bf16, const void* qkv, const float* rope, const int64_t* slots, void* kv, const void* q_norm, const void* k_norm,
                   float eps, void* q, const pd::RopeShape* shape);
void pd_decode_attention(int is_bf16, int use_amx, const void* q, const void* kv, const int32_t* contexts, const int32_t* tables, void* out,
                         const pd::AttentionShape* shape, int threads);
void pd_prefill_attention(int is_bf16, int use_amx, const void* q, const void* kv, const int32_t* query_start, const int32_t* contexts,
                          const int32_t* tables, void* out, const pd::AttentionShape* shape, int threads);
void pd_linear_tiles(const pd::bf16* x, const pd::bf16* packed, const float* bias, void* out, int64_t rows, int64_t n, int64_t k,
                     int out_is_float, int threads);
void pd_linear_rows(int is_bf16, const void* x, const void* weight, const float* bias, void* out, int64_t rows, int64_t n, int64_t k,
                    int out_is_float, int threads);
void pd_int8_tiles(const pd::bf16* x, const int8_t* packed, const float* scale, const float* bias, void* out, int64_t rows, int64_t n,
                   int64_t k, int out_is_float, int threads);
void pd_int8_rows(int is_bf16, const void* x, const int8_t* weight, const float* scale, const float* bias, void* out, int64_t rows,
                  int64_t n, int64_t k, int out_is_float, int threads);
}

namespace pd {

struct Walk {
    const DecoderStep& s;
    int64_t size;  // bytes of an element

    char* at(void* base, int64_t elements) const { return static_cast<char*>(base) + elements * size; }

    void linear(const LinearPart& part, const void* x, void* out, int64_t rows, int64_t threads) const {
        switch (part.kind) {
            case LinearPart::TILES:
                pd_linear_tiles(static_cast<const bf16*>(x), static_cast<const bf16*>(part.weight), part.bias, out, rows, part.n, part.k, 0, threads);
                break;
            case LinearPart::INT8_TILES:
                pd_int8_tiles(static_cast<const bf16*>(x), static_cast<const int8_t*>(part.weight), part.scale, part.bias, out, rows, part.n,
                              part.k, 0, threads);
                break;
            case LinearPart::ROWS:
                pd_linear_rows(s.is_bf16, x, part.weight, part.bias, out, rows, part.n, part.k, 0, threads);
                break;
            default:
                pd_int8_rows(s.is_bf16, x, static_cast<const int8_t*>(part.weight), part.scale, part.bias, out, rows, part.n, part.k, 0,
                             threads);
        }
    }

    void rotate(const LayerPart& layer, void* kv) const {
        int64_t parts = s.rows < 32 * s.threads ? 1 : s.threads, width = layer.qkv.n;
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
        for (int64_t part = 0; part < parts; ++part) {
            int64_t first = s.rows * part / parts;
            RopeShape shape = s.rope_shape;
            shape.tokens = s.rows * (part + 1) / parts - first;
            pd_rope_write(s.is_bf16, at(s.qkv, first * width), s.rope + first * shape.dim, s.slots + first, kv, layer.q_norm, layer.k_norm,
                          layer.qk_eps, at(s.q, first * s.q_size), &shape);
        }
    }

    void attend(void* kv) const {
        if (s.num_decode > 0)
            pd_decode_attention(s.is_bf16, s.use_amx, s.q, kv, s.decode_contexts, s.decode_tables, s.mixed, &s.decode, s.threads);
        if (s.num_decode < s.rows)
            pd_prefill_attention(s.is_bf16, s.use_amx, at(s.q, s.num_decode * s.q_size), kv, s.query_start, s.prefill_contexts,
                                 s.prefill_tables, at(s.mixed, s.num_decode * s.q_size), &s.prefill, s.threads);
    }

    // Only the sampled rows go on; they move to the front, and `sampled` ascends.
    void keep_sampled() const {
        for (int64_t i = 0; i < s.num_sampled; ++i) {
            std::memmove(at(s.mixed, i * s.q_size), at(s.mixed, s.sampled[i] * s.q_size), s.q_size * size);
            std::memmove(at(s.residual, i * s.hidden), at(s.residual, s.sampled[i] * s.hidden), s.hidden * size);
        }
    }

    // Everything after attention, `rows` rows from `first` on; leaves the norm that the next layer begins with.
    void rest(const LayerPart& layer, const void* following, int64_t first, int64_t rows, int64_t threads, int64_t thread) const {
        void *residual = at(s.residual, first * s.hidden), *normed = at(s.normed, first * s.hidden);
        void *projected = at(s.projected, thread * s.block_rows * s.hidden), *inner_rows = at(s.inner_rows, thread * s.block_rows * s.inner);
        void* gate_up = at(s.gate_up, thread * s.block_rows * 2 * s.inner);
        linear(layer.output, at(s.mixed, first * s.q_size), projected, rows, threads);
        pd_rms_norm(s.is_bf16, projected, residual, layer.post_norm, normed, rows, s.hidden, s.eps);
        linear(layer.gate_up, normed, gate_up, rows, threads);
        pd_silu_mul(s.is_bf16, gate_up, inner_rows, rows, s.inner);
        linear(layer.down, inner_rows, projected, rows, threads);
        pd_rms_norm(s.is_bf16, projected, residual, following, normed, rows, s.hidden, s.eps);
    }

    // Many rows: a thread takes blocks of them, all the way. Few: the threads share the columns of each product.
    void rest_of_all(const LayerPart& layer, const void* following, int64_t rows) const {
        if (s.threads == 1 || rows < 32 * s.threads) {
            for (int64_t first = 0; first < rows; first += s.block_rows)
                rest(layer, following, first, std::min(s.block_rows, rows - first), s.threads, 0);
            return;
        }
        int64_t block = std::min(s.block_rows, (rows / s.threads + 31) / 32 * 32), blocks = (rows + block - 1) / block;
#pragma omp parallel for schedule(dynamic) num_threads(s.threads)
        for (int64_t i = 0; i < blocks; ++i)
            rest(layer, following, i * block, std::min(block, rows - i * block), 1, omp_get_thread_num());
    }

    void run() const {
        pd_rms_norm(s.is_bf16, s.residual, nullptr, s.layers[0].input_norm, s.normed, s.rows, s.hidden, s.eps);
        int64_t rows = s.rows;
        for (int64_t i = 0; i < s.num_layers; ++i) {
            const LayerPart& layer = s.layers[i];
            bool is_last = i + 1 == s.num_layers;
            void* kv = at(s.kv, i * s.layer_stride);
            linear(layer.qkv, s.normed, s.qkv, rows, s.threads);
            rotate(layer, kv);
            if (is_last && s.num_sampled == 0) return;
            attend(kv);
            if (is_last && s.num_sampled > 0) {
                keep_sampled();
                rows = s.num_sampled;
            }
            const void* following = is_last ? s.final_norm : s.layers[i + 1].input_norm;
            rest_of_all(layer, following, rows);
        }
    }
};

}  // namespace pd

extern "C" void pd_decoder(const pd::DecoderStep* step) { pd::Walk{*step, step->is_bf16 ? 2 : 4}.run(); }
