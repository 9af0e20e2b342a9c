#include "dspine-ops.h"

#include "ggml-impl.h"

// `t` is F32 [ne0, ne1] with the values of a row side by side; rows may be strided
static void check_rows(const struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    GGML_ASSERT(t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float));
    GGML_ASSERT(t->ne[0] == ne0 && t->ne[1] == ne1 && ggml_is_matrix(t));
}

static void check_weight(const struct ggml_tensor * t, int64_t ne0, int64_t ne1) {
    GGML_ASSERT(t->ne[0] == ne0 && t->ne[1] == ne1 && ggml_is_matrix(t));
}

struct ggml_tensor * ggml_dspine_gate(
        struct ggml_context * ctx,
        struct ggml_tensor  * h,
        struct ggml_tensor  * a,
        struct ggml_tensor  * anchor_value,
        struct ggml_tensor  * anchor_gate,
        struct ggml_tensor  * w_message,
        struct ggml_tensor  * w_receiver,
        struct ggml_tensor  * w_pred,
        struct ggml_tensor  * bias,
        int64_t               n_blocks) {
    const int64_t n_rows  = h->ne[1];
    const int64_t rank    = a->ne[0];
    const int64_t message = bias->ne[0];

    GGML_ASSERT(n_blocks > 0 && n_rows % n_blocks == 0);
    check_rows(h, h->ne[0], n_rows);
    check_rows(a, rank, n_rows);
    check_rows(anchor_value, message, n_blocks);
    check_rows(anchor_gate,  message, n_blocks);
    check_rows(bias, message, 1);
    check_weight(w_message,  rank, message);
    check_weight(w_receiver, rank, message);
    check_weight(w_pred,     rank, message);
    GGML_ASSERT(w_receiver->type == w_message->type && w_pred->type == w_message->type);

    struct ggml_tensor * result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, message, n_rows, 2);
    ggml_set_op_params_i32(result, 0, (int32_t) n_blocks);
    result->op = GGML_OP_DSPINE_GATE;
    struct ggml_tensor * sources[] = { h, a, anchor_value, anchor_gate, w_message, w_receiver, w_pred, bias };
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); ++i) {
        result->src[i] = sources[i];
    }
    return result;
}

struct ggml_tensor * ggml_dspine_cache(
        struct ggml_context * ctx,
        struct ggml_tensor  * head,
        struct ggml_tensor  * norm,
        struct ggml_tensor  * write,
        struct ggml_tensor  * h,
        struct ggml_tensor  * gated,
        struct ggml_tensor  * sent_value,
        struct ggml_tensor  * sent_gate,
        struct ggml_tensor  * candidates,
        struct ggml_tensor  * logits,
        int64_t               n_blocks,
        int64_t               n_scored,
        float                 eps) {
    const int64_t n_embd  = h->ne[0];
    const int64_t n_rows  = h->ne[1];
    const int64_t message = write->ne[0];
    const int64_t top_k   = candidates->ne[0];

    GGML_ASSERT(n_blocks > 0 && n_rows % n_blocks == 0);
    GGML_ASSERT(n_scored >= 0 && n_scored <= n_rows / n_blocks);
    GGML_ASSERT(top_k * (top_k + 1) <= n_embd);
    check_rows(h, n_embd, n_rows);
    check_rows(norm, n_embd, 1);
    check_rows(logits, head->ne[1], n_rows);
    check_weight(head, n_embd, head->ne[1]);
    check_weight(write, message, n_embd);
    GGML_ASSERT(candidates->type == GGML_TYPE_I32 && ggml_is_contiguous(candidates));
    GGML_ASSERT(candidates->ne[1] == n_rows && ggml_is_matrix(candidates));
    GGML_ASSERT(gated->type == GGML_TYPE_F32 && ggml_is_contiguous(gated));
    GGML_ASSERT(gated->ne[0] == message && gated->ne[1] == n_rows && gated->ne[2] == 2 && gated->ne[3] == 1);
    if (n_scored > 2) {
        check_rows(sent_value, message, top_k * (n_scored - 2) * n_blocks);
        check_rows(sent_gate,  message, top_k * (n_scored - 2) * n_blocks);
    } else {
        GGML_ASSERT(sent_value == NULL && sent_gate == NULL);
    }

    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_embd, n_rows);
    ggml_set_op_params_i32(result, 0, (int32_t) n_blocks);
    ggml_set_op_params_i32(result, 1, (int32_t) n_scored);
    ggml_set_op_params_f32(result, 2, eps);
    result->op = GGML_OP_DSPINE_CACHE;
    struct ggml_tensor * sources[] = { head, norm, write, h, gated, sent_value, sent_gate, candidates, logits };
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); ++i) {
        result->src[i] = sources[i];
    }
    return result;
}
