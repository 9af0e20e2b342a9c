// The fused ggml operations of DSpine: one node for what dspine-graph.cpp else composes of stock ones.
// Declared here and not in ggml.h; the op codes GGML_OP_DSPINE_GATE and GGML_OP_DSPINE_CACHE are a hook.
//
// Names: H n_embd, R rank, M message, K top_k, T rows of a block (the anchor included), n blocks,
// S = the rows of a block that are scored (<= T; only the reserve pass has more rows).
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// The message of an adjacent injection, before its write.
//
//   h            F32 [H, T*n]   rows before the injection
//   a            F32 [R, T*n]   their readouts, A_l h
//   anchor_value F32 [M, n]     W_m sqrt(R) C[anchor]; rows may be strided (views of one product)
//   anchor_gate  F32 [M, n]     W_p sqrt(R) C[anchor]
//   w_message, w_receiver, w_pred   [R, M], all of one type (F32, F16 or BF16)
//   bias         F32 [M]
//
// Returns F32 [M, T*n, 2], contiguous. With f_t = sqrt(R) a_t / max(||a_t||, 1e-12), an RMS norm of a_t with
// eps 1e-24 / R, and receiver_t = W_r f_t + b:
//   plane 0: row 0 of a block 0; row t >= 1: (||h_t|| / sqrt(H)) * sigmoid(receiver_t + gate_{t-1}) * value_{t-1},
//            with value_0, gate_0 those of the anchor's code and value_t = W_m f_t, gate_t = W_p f_t after it
//   plane 1: receiver_t, which the transition cache of the last layer reads
GGML_API struct ggml_tensor * ggml_dspine_gate(
        struct ggml_context * ctx,
        struct ggml_tensor  * h,
        struct ggml_tensor  * a,
        struct ggml_tensor  * anchor_value,
        struct ggml_tensor  * anchor_gate,
        struct ggml_tensor  * w_message,
        struct ggml_tensor  * w_receiver,
        struct ggml_tensor  * w_pred,
        struct ggml_tensor  * bias,
        int64_t               n_blocks);

// The transition cache: scores of every pair of neighbouring candidates, packed for the walk.
//
//   head       [H, V] any type with a to_float; rows are gathered
//   norm       F32 [H]           weight of the final RMS norm
//   write      [M, H] F32, F16 or BF16: O of the last layer
//   h          F32 [H, T*n]      pre-injection rows of the last layer
//   gated      F32 [M, T*n, 2]   of ggml_dspine_gate at the last layer; plane 1 is read
//   sent_value F32 [M, K*(S-2)*n]   W_m sqrt(R) C[v] of the candidates of rows 1..S-2, block by block; rows may be strided
//   sent_gate  F32 [M, K*(S-2)*n]   W_p sqrt(R) C[v] of the same
//   candidates I32 [K, T*n]      ggml_top_k of the logits
//   logits     F32 [V, T*n]
//
// Returns F32 [H, T*n], per row [K ids as floats, K*K scores, zeros]; row 0 and rows >= S are zeros. Scores of row 1:
// logits of its own candidates, the same for every predecessor. Of row t >= 2, at k*K + j:
//   head[cand_t[j]] . norm * rms_norm(h_t + (||h_t||/sqrt(H)) O (sigmoid(receiver_t + gate_k) * value_k), eps)
// with k the candidates of row t-1. S <= 2: sent_value and sent_gate are NULL.
// Nothing of width H per pair (k, t) is written to memory.
GGML_API struct ggml_tensor * ggml_dspine_cache(
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
        float                 eps);

#ifdef __cplusplus
}
#endif
