// What surrounds attention in a decoder layer: norms, rotation with the cache write, SiLU gate. Statistics in float32.
#include "rope.h"
#include "simd.h"

#include <cmath>

namespace pd {

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
    f32x16 squares[2] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        f32x16 v = load(x + i);
        squares[i / 16 % 2] = fma(v, v, squares[i / 16 % 2]);
    }
    float total = sum(squares[0] + squares[1]);
    for (; i < n; ++i) total += to_float(x[i]) * to_float(x[i]);
    return 1.0f / std::sqrt(total / static_cast<float>(n) + eps);
}

template <class T>
void scale_by_weight(const T* x, const T* weight, float factor, T* out, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < n; ++i) store_one(out + i, to_float(x[i]) * factor * to_float(weight[i]));
}

template <class T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t n, float eps) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* source = x + r * n;
        if (residual) {
            T* sum_row = residual + r * n;
            int64_t i = 0;
            for (; i + 16 <= n; i += 16) store(sum_row + i, load(sum_row + i) + load(source + i));
            for (; i < n; ++i) store_one(sum_row + i, to_float(sum_row[i]) + to_float(source[i]));
            source = sum_row;
        }
        scale_by_weight(source, weight, inverse_rms(source, n, eps), out + r * n, n);
    }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t inner) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* gate = gate_up + r * 2 * inner;
        const T* up = gate + inner;
        T* target = out + r * inner;
        int64_t i = 0;
        for (; i + 16 <= inner; i += 16) {
            f32x16 g = load(gate + i);
            store(target + i, g / (exp(-g) + 1.0f) * load(up + i));
        }
        for (; i < inner; ++i) {
            float g = to_float(gate[i]);
            store_one(target + i, g / (std::exp(-g) + 1.0f) * to_float(up[i]));
        }
    }
}

// One head: optional RMS norm, then the half-split rotation. `work` is float32 scratch.
template <class T>
void rotate(const T* head, const T* norm, float eps, const float* rope, int64_t dim, T* out) {
    alignas(64) float work[MAX_HEAD_DIM];
    float factor = norm ? inverse_rms(head, dim, eps) : 1.0f;
    for (int64_t i = 0; i < dim; i += 16) {
        f32x16 v = load(head + i);
        store(work + i, norm ? v * factor * load(norm + i) : v);
    }
    int64_t half = dim / 2;
    const float *cosine = rope, *sine = rope + half;
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        f32x16 a = load(work + i), b = load(work + half + i), c = load(cosine + i), s = load(sine + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        store_one(out + i, work[i] * cosine[i] - work[half + i] * sine[i]);
        store_one(out + half + i, work[half + i] * cosine[i] + work[i] * sine[i]);
    }
}

template <class T>
void rope_write(const T* qkv, const float* rope, const int64_t* slots, T* kv, const T* q_norm, const T* k_norm, float eps, T* q,
                const RopeShape& s) {
    for (int64_t t = 0; t < s.tokens; ++t) {
        const T* row = qkv + t * (s.q_heads + 2 * s.kv_heads) * s.dim;
        const float* angles = rope + t * s.dim;
        for (int64_t h = 0; h < s.q_heads; ++h)
            rotate(row + h * s.dim, q_norm, eps, angles, s.dim, q + (t * s.q_heads + h) * s.dim);
        T* slot = kv + slots[t] / s.block_size * s.block_stride + slots[t] % s.block_size * s.token_stride;
        const T* keys = row + s.q_heads * s.dim;
        const T* values = keys + s.kv_heads * s.dim;
        for (int64_t h = 0; h < s.kv_heads; ++h) {
            rotate(keys + h * s.dim, k_norm, eps, angles, s.dim, slot + h * s.head_stride);
            std::memcpy(slot + s.kv_stride + h * s.head_stride, values + h * s.dim, s.dim * sizeof(T));
        }
    }
}

}  // namespace pd

using pd::bf16;

// residual may be null: a plain norm of x. Otherwise residual += x in place first.
extern "C" void pd_rms_norm(int is_bf16, const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t n, float eps) {
    if (is_bf16) {
        pd::rms_norm(static_cast<const bf16*>(x), static_cast<bf16*>(residual), static_cast<const bf16*>(weight), static_cast<bf16*>(out), rows, n, eps);
    } else {
        pd::rms_norm(static_cast<const float*>(x), static_cast<float*>(residual), static_cast<const float*>(weight), static_cast<float*>(out), rows, n, eps);
    }
}

extern "C" void pd_silu_mul(int is_bf16, const void* gate_up, void* out, int64_t rows, int64_t inner) {
    if (is_bf16) {
        pd::silu_mul(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), rows, inner);
    } else {
        pd::silu_mul(static_cast<const float*>(gate_up), static_cast<float*>(out), rows, inner);
    }
}

extern "C" void pd_rope_write(int is_bf16, const void* qkv, const float* rope, const int64_t* slots, void* kv, const void* q_norm,
                              const void* k_norm, float eps, void* q, const pd::RopeShape* shape) {
    if (is_bf16) {
        pd::rope_write(static_cast<const bf16*>(qkv), rope, slots, static_cast<bf16*>(kv), static_cast<const bf16*>(q_norm),
                       static_cast<const bf16*>(k_norm), eps, static_cast<bf16*>(q), *shape);
    } else {
        pd::rope_write(static_cast<const float*>(qkv), rope, slots, static_cast<float*>(kv), static_cast<const float*>(q_norm),
                       static_cast<const float*>(k_norm), eps, static_cast<float*>(q), *shape);
    }
}
