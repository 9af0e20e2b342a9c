#include "dspine-cuda.cuh"

#include "dspine-cache.cuh"
#include "dspine-gate.cuh"

static bool dspine_is_bridge(const ggml_tensor * w) {
    return (w->type == GGML_TYPE_F32 || w->type == GGML_TYPE_F16 || w->type == GGML_TYPE_BF16) && ggml_is_contiguous(w);
}

// rows without gaps inside; they may be apart
static bool dspine_is_rows(const ggml_tensor * t, const ggml_type type) {
    return t->type == type && t->nb[0] == ggml_type_size(type) && t->ne[2] == 1 && t->ne[3] == 1;
}

static bool dspine_supports_gate(const ggml_tensor * op) {
    const ggml_tensor * const * w = op->src + 4;
    for (int i = 0; i < 4; ++i) {
        if (!dspine_is_rows(op->src[i], GGML_TYPE_F32)) {
            return false;
        }
    }
    return dspine_is_bridge(w[0]) && dspine_is_bridge(w[1]) && dspine_is_bridge(w[2]) &&
        w[0]->type == w[1]->type && w[0]->type == w[2]->type &&
        op->src[7]->type == GGML_TYPE_F32 && ggml_is_contiguous(op->src[7]) && ggml_is_contiguous(op);
}

static bool dspine_supports_cache(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const ggml_tensor * candidates = op->src[7];
    // the backend itself knows best whose rows it gathers
    ggml_tensor gather = {};
    gather.op     = GGML_OP_GET_ROWS;
    gather.type   = GGML_TYPE_F32;
    gather.src[0] = op->src[0];
    gather.src[1] = op->src[7];
    for (int i : { 3, 5, 6, 8 }) {
        if (op->src[i] && !dspine_is_rows(op->src[i], GGML_TYPE_F32)) {
            return false;
        }
    }
    return candidates->ne[0] <= DSPINE_MAX_TOP_K && dspine_is_rows(candidates, GGML_TYPE_I32) &&
        dspine_is_bridge(op->src[2]) &&
        op->src[1]->type == GGML_TYPE_F32 && ggml_is_contiguous(op->src[1]) &&
        op->src[4]->type == GGML_TYPE_F32 && ggml_is_contiguous(op->src[4]) && ggml_is_contiguous(op) &&
        ggml_backend_dev_supports_op(dev, &gather);
}

bool dspine_cuda_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return op->op == GGML_OP_DSPINE_GATE ? dspine_supports_gate(op) : dspine_supports_cache(dev, op);
}

template <typename T>
static void dspine_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (dst->op == GGML_OP_DSPINE_GATE) {
        dspine_gate<T>(ctx, dst);
    } else {
        dspine_cache<T>(ctx, dst);
    }
}

void dspine_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * bridge = dst->src[dst->op == GGML_OP_DSPINE_GATE ? 4 : 2];
    switch (bridge->type) {
        case GGML_TYPE_F32:  dspine_compute<float>(ctx, dst); break;
        case GGML_TYPE_F16:  dspine_compute<half>(ctx, dst); break;
        case GGML_TYPE_BF16: dspine_compute<nv_bfloat16>(ctx, dst); break;
        default: GGML_ABORT("%s: bridge weights of type %s", ggml_op_desc(dst), ggml_type_name(bridge->type));
    }
}
