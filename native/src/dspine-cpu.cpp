// The CPU twins of dspine-ops.h. The matrix products are upstream's: llamafile_sgemm, which all threads call
// together, or the dot product of the weight's type, for the gate; simd_gemm, one thread a tile, for the cache.
// Messages have the bits that the stock operations give them: one in the last place would be rounded to another
// BF16 value now and then, and show in the scores.
#include "dspine-cpu.h"

#include "dspine-amx.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "simd-gemm.h"
#include "vec.h"

#ifdef GGML_USE_LLAMAFILE
#include "llamafile/sgemm.h"
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr int64_t LINE = 64;  // bytes; parts of the work buffer start at cache lines
constexpr int64_t PART = 256; // values of a message at a time

struct range {
    int64_t first;
    int64_t last;
};

// this thread's part of [0, n)
range share(const ggml_compute_params * params, int64_t n) {
    return { n * params->ith / params->nth, n * (params->ith + 1) / params->nth };
}

const float * row(const ggml_tensor * t, int64_t i) {
    return (const float *) ((const char *) t->data + i * t->nb[1]);
}

float * row(ggml_tensor * t, int64_t i) {
    return (float *) ((char *) t->data + i * t->nb[1]);
}

// summed as GGML_OP_RMS_NORM and GGML_OP_MEAN do
ggml_float sum_of_squares(int64_t n, const float * x) {
    ggml_float sum = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        sum += (ggml_float) (x[i] * x[i]);
    }
    return sum;
}

// ||h|| / sqrt(H)
float row_norm(const ggml_tensor * h, int64_t i) {
    return std::sqrt((float) sum_of_squares(h->ne[0], row(h, i)) / (float) h->ne[0]);
}

// out = sigmoid(receiver + gate) * value * scale
void gate_message(int64_t n, const float * receiver, const float * gate, const float * value, float scale, float * out) {
    ggml_vec_add_f32((int) n, out, gate, receiver);
    ggml_vec_sigmoid_f32((int) n, out, out);
    ggml_vec_mul_f32((int) n, out, out, value);
    ggml_vec_scale_f32((int) n, out, scale);
}

// The right side of a product: rows in the type that the weight's dot product wants.
struct operand {
    ggml_type type;
    int64_t   width;
    size_t    row_size;
    char    * data;

    operand(const ggml_tensor * weight, char * data)
        : type(ggml_get_type_traits_cpu(weight->type)->vec_dot_type), width(weight->ne[0]),
          row_size(ggml_row_size(type, width)), data(data) {}

    // puts n values into row i, from column `at` on
    void store(int64_t i, int64_t at, const float * x, int64_t n) const {
        ggml_get_type_traits_cpu(type)->from_float(x, data + i * row_size + at * ggml_type_size(type), n);
    }
};

// out[i + M * j] = weight row i . x row j, for the M rows of the weight and j < n. All threads call it with the same
// arguments after a barrier; `out` is complete after the next one.
void product(const ggml_compute_params * params, const ggml_tensor * weight, const operand & x, int64_t n, float * out) {
    const int64_t m = weight->ne[1];
#ifdef GGML_USE_LLAMAFILE
    if (llamafile_sgemm(params, m, n, x.width, weight->data, weight->nb[1] / ggml_type_size(weight->type),
            x.data, x.row_size / ggml_type_size(x.type), out, m, weight->type, x.type, GGML_TYPE_F32)) {
        return;
    }
#endif
    const ggml_vec_dot_t vec_dot = ggml_get_type_traits_cpu(weight->type)->vec_dot;
    const range mine = share(params, m);
    for (int64_t j = 0; j < n; ++j) {
        for (int64_t i = mine.first; i < mine.last; ++i) {
            vec_dot((int) x.width, out + i + m * j, 0, row(weight, i), 0, x.data + j * x.row_size, 0, 1);
        }
    }
}

// n values of any type that has rows, as F32
void widen(ggml_type type, const void * data, float * out, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:  std::memcpy(out, data, n * sizeof(float)); break;
        case GGML_TYPE_F16:  ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) data, out, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) data, out, n); break;
        default:             ggml_get_type_traits(type)->to_float(data, out, n); break;
    }
}

// columns [at, at + n) of row i
void widen_row(const ggml_tensor * t, int64_t i, int64_t at, int64_t n, float * out) {
    widen(t->type, (const char *) t->data + i * t->nb[1] + ggml_row_size(t->type, at), out, n);
}

// Hands out parts of the work buffer.
struct carver {
    char * base;
    size_t used = 0;

    char * take(size_t bytes) {
        char * part = base + used;
        used += GGML_PAD(bytes, LINE);
        return part;
    }

    float * floats(int64_t n) {
        return (float *) take(n * sizeof(float));
    }
};

// -- gate -------------------------------------------------------------------------------------

struct gate_work {
    operand features;
    float * value; // [M, rows], W_m f
    float * gate;  // [M, rows], W_p f
    size_t  size;

    gate_work(const ggml_tensor * node, void * base) : features(node->src[4], nullptr) {
        carver work = { (char *) base };
        features.data = work.take(features.row_size * node->ne[1]);
        value = work.floats(node->ne[0] * node->ne[1]);
        gate  = work.floats(node->ne[0] * node->ne[1]);
        size  = work.used;
    }
};

// f = sqrt(R) a / max(||a||, 1e-12), an RMS norm of a
void store_feature(const operand & features, int64_t i, const float * a) {
    const int64_t rank  = features.width;
    const float   mean  = sum_of_squares(rank, a) / rank;
    const float   scale = 1.0f / std::sqrt(mean + 1e-24f / (float) rank);
    float part[PART];
    for (int64_t at = 0; at < rank; at += PART) {
        const int64_t n = std::min(PART, rank - at);
        for (int64_t c = 0; c < n; ++c) {
            part[c] = a[at + c] * scale;
        }
        features.store(i, at, part, n);
    }
}

// -- cache ------------------------------------------------------------------------------------

// One item of the cache's work is a tile of the hidden size times a group of positions. What it computes of width
// TILE, O value and the refined rows, stays in the scratch of its thread; what it leaves are sums over the tile.
constexpr int64_t TILE  = 256; // columns of the hidden size, a multiple of every head type's block
constexpr int64_t STRIP = 64;  // of these, as many rows of O as are widened to F32 at a time
constexpr int64_t GROUP = 64;  // pairs: four vectors of AVX-512, which the kernel of simd_gemm takes at once

// Shapes and the work buffer of a cache node. A position is a row t >= 2 of a block that is scored.
struct cache_work {
    int64_t n_embd, message, rows, scored, top_k;
    int64_t positions; // of all blocks
    int64_t in_group;  // positions
    int64_t groups, tiles;
    bool    amx;       // O is applied on the CPU's own tiles

    float * values;  // [pairs, M] a group, transposed: what O is applied to; for `amx` as dspine-amx.h packs it
    float * sums;    // [K (k), K (j) + 1] a tile and position: dots with the head rows, then squares of the refined row
    float * scratch; // of this thread
    size_t  size;

    cache_work(const ggml_tensor * node, void * base, int ith, int nth) {
        const int64_t n_blocks = ggml_get_op_params_i32(node, 0);
        n_embd    = node->ne[0];
        message   = node->src[2]->ne[0];
        rows      = node->ne[1] / n_blocks;
        scored    = ggml_get_op_params_i32(node, 1);
        top_k     = node->src[7]->ne[0];
        positions = std::max<int64_t>(scored - 2, 0) * n_blocks;
        in_group  = std::max<int64_t>(GROUP / top_k, 1);
        groups    = (positions + in_group - 1) / in_group;
        tiles     = (n_embd + TILE - 1) / TILE;
        amx       = node->src[2]->type == GGML_TYPE_BF16 && top_k % DSPINE_TILE_SIDE == 0 && n_embd % DSPINE_TILE_SIDE == 0 &&
            message % DSPINE_TILE_DEPTH == 0 && dspine_has_tiles();

        carver work = { (char *) base };
        values = work.floats(groups * group_size());
        sums   = work.floats(tiles * positions * sums_size());
        const int64_t own = GGML_PAD(STRIP * message + TILE * in_group * top_k + 2 * TILE * top_k, LINE);
        scratch = work.floats(own * nth) + own * ith;
        size    = work.used;
    }

    int64_t group_size() const { return message * in_group * top_k; }
    int64_t sums_size()  const { return top_k * (top_k + 1); }

    // positions of a group; the last may have fewer
    int64_t count_of(int64_t group) const { return std::min(in_group, positions - group * in_group); }

    // row of the batch that position p is
    int64_t row_of(int64_t p) const {
        return p / (scored - 2) * rows + 2 + p % (scored - 2);
    }
};

const int32_t * candidates_of(const ggml_tensor * node, int64_t i) {
    return (const int32_t *) row(node->src[7], i);
}

// ids, and the scores of row 1, whose predecessor, the anchor, is already written into its logits
void cache_pack(const ggml_compute_params * params, const cache_work & w, ggml_tensor * node) {
    const ggml_tensor * logits = node->src[8];
    const range mine = share(params, node->ne[1]);
    for (int64_t i = mine.first; i < mine.last; ++i) {
        float * out = row(node, i);
        std::memset(out, 0, node->ne[0] * sizeof(float));
        const int64_t t = i % w.rows;
        if (t == 0 || t >= w.scored) {
            continue;
        }
        const int32_t * ids = candidates_of(node, i);
        for (int64_t j = 0; j < w.top_k; ++j) {
            GGML_ASSERT(ids[j] >= 0 && ids[j] < logits->ne[0]);
            out[j] = (float) ids[j];
            for (int64_t k = 0; t == 1 && k < w.top_k; ++k) {
                out[w.top_k + k * w.top_k + j] = row(logits, i)[ids[j]];
            }
        }
    }
}

// n BF16 values of one pair's message, from column `at` on, into the column that the pair is in its group
void pack_pair(const cache_work & w, int64_t group, int64_t column, int64_t at, const char * values, int64_t n) {
    char * packed = (char *) (w.values + group * w.group_size());
    packed += (column / DSPINE_TILE_SIDE * w.message / 2 * DSPINE_TILE_SIDE + column % DSPINE_TILE_SIDE) * sizeof(uint32_t);
    for (int64_t c = 0; c < n; c += 2) {
        std::memcpy(packed + (at + c) / 2 * DSPINE_TILE_SIDE * sizeof(uint32_t), values + c * sizeof(uint16_t), sizeof(uint32_t));
    }
}

// the message of every pair, times the norm of the row that receives it, rounded as a product with O rounds it
void cache_messages(const ggml_compute_params * params, const cache_work & w, const ggml_tensor * node) {
    const ggml_tensor * gated = node->src[4];
    const ggml_type type = node->src[2]->type;
    const range mine = share(params, w.positions * w.top_k);
    float part[PART];
    char rounded[PART * sizeof(float)];
    float norm = 0.0f;
    for (int64_t pair = mine.first; pair < mine.last; ++pair) {
        const int64_t p = pair / w.top_k;
        const int64_t i = w.row_of(p);
        if (pair == mine.first || pair % w.top_k == 0) {
            norm = row_norm(node->src[3], i);
        }
        const int64_t group = p / w.in_group;
        const int64_t pairs = w.count_of(group) * w.top_k;
        const float * receiver = (const float *) ((const char *) gated->data + gated->nb[2] + i * gated->nb[1]);
        float * out = w.values + group * w.group_size() + pair - group * w.in_group * w.top_k;
        for (int64_t at = 0; at < w.message; at += PART) {
            const int64_t n = std::min(PART, w.message - at);
            gate_message(n, receiver + at, row(node->src[6], pair) + at, row(node->src[5], pair) + at, norm, part);
            ggml_get_type_traits_cpu(type)->from_float(part, rounded, n);
            if (w.amx) {
                pack_pair(w, group, pair - group * w.in_group * w.top_k, at, rounded, n);
                continue;
            }
            widen(type, rounded, part, n);
            for (int64_t c = 0; c < n; ++c) {
                out[(at + c) * pairs] = part[c];
            }
        }
    }
}

// sums over columns [at, at + n) for the positions of a group
void cache_tile(const cache_work & w, const ggml_tensor * node, int64_t at, int64_t group) {
    const int64_t n     = std::min(TILE, w.n_embd - at);
    const int64_t first = group * w.in_group;
    const int64_t count = w.count_of(group);
    const int64_t pairs = count * w.top_k;
    float * strip   = w.scratch;                      // [M, STRIP]
    float * written = strip + STRIP * w.message;      // [pairs, n], O value
    float * refined = written + TILE * pairs;         // [K, n] of one position
    float * head    = refined + TILE * w.top_k;       // [n, K], head rows times the norm's weight

    const ggml_tensor * write = node->src[2];
    const float * values = w.values + group * w.group_size();
    if (w.amx) {
        dspine_tiles_multiply((const uint16_t *) row(write, at), write->nb[1] / sizeof(uint16_t), n,
                (const uint32_t *) values, pairs, w.message, written, pairs);
    } else {
        std::fill(written, written + n * pairs, 0.0f);
        for (int64_t c = 0; c < n; c += STRIP) {
            const int64_t m = std::min(STRIP, n - c);
            for (int64_t i = 0; i < m; ++i) {
                widen(write->type, row(write, at + c + i), strip + i * w.message, w.message);
            }
            simd_gemm(written + c * pairs, strip, values, (int) m, (int) w.message, (int) pairs);
        }
    }

    const float * norm = row(node->src[1], 0) + at;
    for (int64_t p = 0; p < count; ++p) {
        const int64_t i = w.row_of(first + p);
        float * dots    = w.sums + (at / TILE * w.positions + first + p) * w.sums_size(); // [K (k), K (j)]
        float * squares = dots + w.top_k * w.top_k;
        std::fill(dots, dots + w.sums_size(), 0.0f);
        for (int64_t j = 0; j < w.top_k; ++j) {
            float * out = head + j * n;
            widen_row(node->src[0], candidates_of(node, i)[j], at, n, out);
            ggml_vec_mul_f32((int) n, out, out, norm);
        }
        const float * h = row(node->src[3], i) + at;
        for (int64_t c = 0; c < n; ++c) {
            const float * u = written + c * pairs + p * w.top_k;
            for (int64_t k = 0; k < w.top_k; ++k) {
                const float value = u[k] + h[c];
                refined[c * w.top_k + k] = value;
                squares[k] += value * value;
            }
        }
        simd_gemm(dots, head, refined, (int) w.top_k, (int) n, (int) w.top_k);
    }
}

// score[k, j] = dot / rms; tiles are added in order, whoever computed them
void cache_scores(const ggml_compute_params * params, const cache_work & w, ggml_tensor * node) {
    const float eps = ggml_get_op_params_f32(node, 2);
    const range mine = share(params, w.positions);
    for (int64_t p = mine.first; p < mine.last; ++p) {
        float * sums = w.sums + p * w.sums_size();
        for (int64_t tile = 1; tile < w.tiles; ++tile) {
            ggml_vec_acc_f32((int) w.sums_size(), sums, sums + tile * w.positions * w.sums_size());
        }
        float * out = row(node, w.row_of(p)) + w.top_k;
        for (int64_t k = 0; k < w.top_k; ++k) {
            const float scale = 1.0f / std::sqrt(sums[w.top_k * w.top_k + k] / (float) w.n_embd + eps);
            for (int64_t j = 0; j < w.top_k; ++j) {
                out[k * w.top_k + j] = sums[j * w.top_k + k] * scale;
            }
        }
    }
}

bool is_bridge_type(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
}

bool dequantizes(ggml_type type) {
    return type == GGML_TYPE_F32 || (ggml_get_type_traits(type)->to_float && TILE % ggml_blck_size(type) == 0);
}

} // namespace

bool dspine_cpu_supports_op(const ggml_tensor * op) {
    for (const ggml_tensor * src : op->src) {
        // a repacked weight has no rows to read
        if (src && src->buffer && src->op == GGML_OP_NONE && !ggml_backend_buffer_is_host(src->buffer)) {
            return false;
        }
        if (src && src->nb[0] != ggml_type_size(src->type)) {
            return false;
        }
    }
    switch (op->op) {
        case GGML_OP_DSPINE_GATE:
            return is_bridge_type(op->src[4]->type);
        case GGML_OP_DSPINE_CACHE:
            return is_bridge_type(op->src[2]->type) && dequantizes(op->src[0]->type);
        default:
            return false;
    }
}

size_t dspine_cpu_gate_work_size(const ggml_tensor * node) {
    return gate_work(node, nullptr).size;
}

size_t dspine_cpu_cache_work_size(const ggml_tensor * node, int n_tasks) {
    return cache_work(node, nullptr, 0, n_tasks).size;
}

void dspine_cpu_gate(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * h = dst->src[0];
    const ggml_tensor * a = dst->src[1];
    const int64_t message = dst->ne[0];
    const int64_t n_rows  = dst->ne[1];
    const int64_t rows    = n_rows / ggml_get_op_params_i32(dst, 0);
    float * messages = (float *) dst->data;
    float * receiver = messages + message * n_rows;
    const gate_work w(dst, params->wdata);

    const range mine = share(params, n_rows);
    for (int64_t i = mine.first; i < mine.last; ++i) {
        store_feature(w.features, i, row(a, i));
    }
    ggml_barrier(params->threadpool);
    product(params, dst->src[4], w.features, n_rows, w.value);
    product(params, dst->src[5], w.features, n_rows, receiver);
    product(params, dst->src[6], w.features, n_rows, w.gate);
    ggml_barrier(params->threadpool);

    const float * bias = row(dst->src[7], 0);
    for (int64_t i = mine.first; i < mine.last; ++i) {
        const int64_t block = i / rows;
        const int64_t t     = i % rows;
        float * own = receiver + i * message;
        for (int64_t c = 0; c < message; ++c) {
            own[c] += bias[c];
        }
        float * out = messages + i * message;
        if (t == 0) {
            std::memset(out, 0, message * sizeof(float));
            continue;
        }
        const float * value = t == 1 ? row(dst->src[2], block) : w.value + (i - 1) * message;
        const float * gate  = t == 1 ? row(dst->src[3], block) : w.gate  + (i - 1) * message;
        gate_message(message, own, gate, value, row_norm(h, i), out);
    }
}

void dspine_cpu_cache(const ggml_compute_params * params, ggml_tensor * dst) {
    const cache_work w(dst, params->wdata, params->ith, params->nth);
    cache_pack(params, w, dst);
    if (w.positions == 0) {
        return;
    }
    cache_messages(params, w, dst);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth); // every thread starts with the item of its number
    }
    ggml_barrier(params->threadpool);
    for (int64_t item = params->ith; item < w.tiles * w.groups; item = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        cache_tile(w, dst, item / w.groups * TILE, item % w.groups);
    }
    ggml_barrier(params->threadpool);
    cache_scores(params, w, dst);
}
