#include "dspine-graph.h"

#include "llama-graph.h"

#include <algorithm>
#include <cmath>

dspine_graph::dspine_graph(llm_graph_context & g, const dspine_model & model, ggml_tensor * tokens)
    : g(g), model(model), tokens(tokens) {
    if (!model.enabled()) {
        return;
    }
    n_blocks = g.ubatch.n_seqs_unq;
    // the draft context is sized so that a batch is never cut; see dspine_size_draft_batch
    GGML_ASSERT(n_blocks > 0 && g.n_tokens % n_blocks == 0 && "DSpine blocks must have equal sizes");
    rows = g.n_tokens / n_blocks;
    // a block is never longer than trained; only the reserve pass builds longer ones, and must not pay for them
    scored = std::min<int64_t>(rows, g.hparams.dflash_block_size);

    ggml_tensor * ids = ggml_cont_1d(g.ctx0,
            ggml_view_2d(g.ctx0, tokens, 1, n_blocks, rows * tokens->nb[0], 0), n_blocks);
    anchor = project_predecessor(code(ids));
}

// sqrt(R) * C[ids], [rank, n]
ggml_tensor * dspine_graph::code(ggml_tensor * ids) {
    return ggml_scale(g.ctx0, ggml_get_rows(g.ctx0, model.codes, ids), std::sqrt((float) model.rank));
}

// feature_l(h) = sqrt(R) * (A_l h) / max(||A_l h||, 1e-12): an RMS norm with eps 1e-24 / R
ggml_tensor * dspine_graph::feature(ggml_tensor * h, int il) {
    ggml_tensor * a = g.build_lora_mm(model.layers[il].readout, h);
    return ggml_rms_norm(g.ctx0, a, 1e-24f / (float) model.rank);
}

dspine_graph::messages dspine_graph::project_predecessor(ggml_tensor * x) {
    return { g.build_lora_mm(model.w_message, x), g.build_lora_mm(model.w_pred, x) };
}

// rows [first, first + count) of every block of a [width, n_tokens] tensor: [width, count, n_blocks]
ggml_tensor * dspine_graph::rows_view(ggml_tensor * t, int64_t first, int64_t count) {
    return ggml_view_3d(g.ctx0, t, t->ne[0], count, n_blocks, t->nb[1], rows * t->nb[1], first * t->nb[1]);
}

// what row t of a block receives from row t-1, and row 1 from the anchor's code:
// [width, rows - 1, n_blocks] from [width, n_tokens] and [width, n_blocks]
ggml_tensor * dspine_graph::shift(ggml_tensor * of_rows, ggml_tensor * of_anchors) {
    ggml_tensor * first = ggml_reshape_3d(g.ctx0, of_anchors, of_anchors->ne[0], 1, n_blocks);
    if (rows == 2) {
        return first;
    }
    return ggml_concat(g.ctx0, first, rows_view(of_rows, 1, rows - 2), 1);
}

// write_l(h, recv, pred) = h + ||h||/sqrt(H) * O_l (sigmoid(W_r recv + W_p pred + b) * (W_m pred))
ggml_tensor * dspine_graph::inject(ggml_tensor * h, int il) {
    if (!model.enabled() || rows < 2) {
        return h;
    }
    ggml_context * ctx0 = g.ctx0;

    ggml_tensor * recv     = feature(h, il);
    ggml_tensor * receiver = ggml_add(ctx0, g.build_lora_mm(model.w_receiver, recv), model.bias);
    ggml_tensor * norm     = ggml_sqrt(ctx0, ggml_mean(ctx0, ggml_sqr(ctx0, h)));

    const messages sent = project_predecessor(recv);
    ggml_tensor * gate  = ggml_sigmoid(ctx0, ggml_add(ctx0, shift(sent.gate, anchor.gate), rows_view(receiver, 1, rows - 1)));
    ggml_tensor * value = ggml_mul(ctx0, gate, shift(sent.value, anchor.value));
    value = ggml_mul(ctx0, value, rows_view(norm, 1, rows - 1));

    // the anchor rows get a message of zeros: cheaper than padding the n_embd-wide result
    value = ggml_pad_ext(ctx0, value, 0, 0, 1, 0, 0, 0, 0, 0);
    value = ggml_reshape_2d(ctx0, value, model.message, g.n_tokens);

    if (il == (int) model.layers.size() - 1) {
        last_hidden   = h;
        last_receiver = receiver;
        last_norm     = norm;
    }
    g.cb(h, "dspine_pre_injection", il);
    ggml_tensor * out = ggml_add(ctx0, h, g.build_lora_mm(model.layers[il].write, value));
    g.cb(out, "dspine_post_injection", il);
    return out;
}

// score_t[k, j] = lm_head[cand_t[j]] . refine_t(cand_{t-1}[k]) for t in [2, scored), where
// refine_t(v) = rms_norm(write_{L-1}(g_t, feature(g_t), sqrt(R) C[v])). Returns [K (j), K (k), scored - 2, n_blocks].
ggml_tensor * dspine_graph::pair_scores(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight) {
    ggml_context * ctx0 = g.ctx0;
    const int64_t top_k = candidates->ne[0];
    const int64_t n_pos = scored - 2;
    const int64_t n_all = top_k * n_pos * n_blocks;

    ggml_tensor * prev = ggml_reshape_1d(ctx0, ggml_cont(ctx0, rows_view(candidates, 1, n_pos)), n_all);
    ggml_tensor * next = ggml_reshape_1d(ctx0, ggml_cont(ctx0, rows_view(candidates, 2, n_pos)), n_all);

    // one row of [width, K, n_pos, n_blocks] per position, shared by its K predecessors
    auto per_position = [&](ggml_tensor * t) {
        ggml_tensor * v = rows_view(t, 2, n_pos);
        return ggml_view_4d(ctx0, v, t->ne[0], 1, n_pos, n_blocks, v->nb[1], v->nb[1], v->nb[2], 0);
    };
    auto per_pair = [&](ggml_tensor * t) {
        return ggml_reshape_4d(ctx0, t, t->ne[0], top_k, n_pos, n_blocks);
    };

    const messages sent = project_predecessor(code(prev));
    ggml_tensor * gate  = ggml_sigmoid(ctx0, ggml_add(ctx0, per_pair(sent.gate), per_position(last_receiver)));
    ggml_tensor * value = ggml_mul(ctx0, gate, per_pair(sent.value));
    value = ggml_mul(ctx0, value, per_position(last_norm));

    ggml_tensor * write  = g.build_lora_mm(model.layers.back().write, ggml_reshape_2d(ctx0, value, model.message, n_all));
    ggml_tensor * refine = ggml_add(ctx0, per_pair(write), per_position(last_hidden));
    refine = ggml_mul(ctx0, ggml_rms_norm(ctx0, refine, g.norm_rms_eps), norm_weight);

    ggml_tensor * head_rows = per_pair(ggml_get_rows(ctx0, head, next));
    ggml_tensor * scores    = ggml_mul_mat(ctx0, head_rows, refine);
    return head_scale ? ggml_mul(ctx0, scores, head_scale) : scores;
}

// [n_embd, count, n_blocks]: K ids as floats, K*K scores, zeros
ggml_tensor * dspine_graph::pack(ggml_tensor * ids, ggml_tensor * scores, int64_t first, int64_t count) {
    ggml_context * ctx0 = g.ctx0;
    const int64_t top_k = ids->ne[0];
    ggml_tensor * row = ggml_concat(ctx0, rows_view(ids, first, count),
            ggml_reshape_3d(ctx0, scores, top_k * top_k, count, n_blocks), 0);
    return ggml_pad(ctx0, row, g.n_embd - top_k * (top_k + 1), 0, 0, 0);
}

void dspine_graph::lattice(ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight) {
    if (!model.enabled()) {
        return;
    }
    ggml_context * ctx0 = g.ctx0;
    const int64_t top_k = g.hparams.dflash_selector_top_k;
    ggml_tensor * logits = g.res->t_logits;
    GGML_ASSERT(logits->ne[1] == g.n_tokens);

    ggml_tensor * packed = ggml_fill(ctx0, ggml_new_tensor_3d(ctx0, GGML_TYPE_F32, g.n_embd, 1, n_blocks), 0.0f);
    if (scored > 1) {
        ggml_tensor * candidates = ggml_top_k(ctx0, logits, top_k);
        ggml_tensor * ids        = ggml_cast(ctx0, candidates, GGML_TYPE_F32);
        // the first draft has one predecessor, the anchor, already written into row 1: its scores are row 1's own logits
        ggml_tensor * column = ggml_reshape_3d(ctx0, logits, 1, logits->ne[0], g.n_tokens);
        ggml_tensor * own    = ggml_reshape_2d(ctx0, ggml_get_rows(ctx0, column, candidates), top_k, g.n_tokens);
        ggml_tensor * first  = ggml_repeat_4d(ctx0, rows_view(own, 1, 1), top_k, top_k, n_blocks, 1);
        packed = ggml_concat(ctx0, packed, pack(ids, first, 1, 1), 1);
        if (scored > 2) {
            ggml_tensor * scores = pair_scores(candidates, head, head_scale, norm_weight);
            packed = ggml_concat(ctx0, packed, pack(ids, scores, 2, scored - 2), 1);
        }
    }
    if (scored < rows) {
        packed = ggml_pad(ctx0, packed, 0, rows - scored, 0, 0);
    }
    packed = ggml_reshape_2d(ctx0, packed, g.n_embd, g.n_tokens);
    g.cb(packed, "dspine_lattice", -1);
    g.res->t_h_nextn = packed;
    ggml_build_forward_expand(g.gf, packed);
}
