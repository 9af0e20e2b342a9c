#include "dspine-graph.h"

#include "dspine-ops.h"
#include "llama-graph.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

// DSPINE_FUSED=0 composes everything of stock operations: the reference that tests compare with
static bool fusion_allowed() {
    static const bool allowed = [] {
        const char * value = std::getenv("DSPINE_FUSED");
        return !value || std::strcmp(value, "0") != 0;
    }();
    return allowed;
}

// The backend to which the scheduler gives an operation that reads `weight`: the first that uses its buffer. Its own
// search asks for support of the operation as well, and so passes over accelerators that only multiply matrices.
static ggml_backend_t backend_of(ggml_backend_sched_t sched, const ggml_tensor * weight) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_ACCEL &&
                ggml_backend_supports_buft(backend, ggml_backend_buffer_get_type(weight->buffer))) {
            return backend;
        }
    }
    return nullptr;
}

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

    anchor = messages_of_anchors();
}

// Others forward the question to a device, and then send it what this build alone knows (RPC), or split it (meta).
static bool has_twins(ggml_backend_t backend) {
    ggml_backend_dev_t dev = ggml_backend_get_device(backend);
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    if (!reg || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META) {
        return false;
    }
    const char * name = ggml_backend_reg_name(reg);
    return std::strcmp(name, "CPU") == 0 || std::strcmp(name, "CUDA") == 0;
}

// `node` if one backend holds all its weights and computes it, else nullptr. Asked while the graph is built, since the
// scheduler itself would rather copy the weights to a backend that supports the operation, in every round.
ggml_tensor * dspine_graph::if_fused(ggml_tensor * node) {
    ggml_backend_t backend = nullptr;
    for (const ggml_tensor * src : node->src) {
        if (!src || !src->buffer) {
            continue; // computed by this graph
        }
        ggml_backend_t of_src = backend_of(g.sched, src);
        if (!of_src || (backend && of_src != backend)) {
            return nullptr;
        }
        backend = of_src;
    }
    return backend && has_twins(backend) && ggml_backend_supports_op(backend, node) ? node : nullptr;
}

// sqrt(R) * C[ids], [rank, n]
ggml_tensor * dspine_graph::code(ggml_tensor * ids) {
    return ggml_scale(g.ctx0, ggml_get_rows(g.ctx0, model.codes, ids), std::sqrt((float) model.rank));
}

// feature_l(h) = sqrt(R) * a / max(||a||, 1e-12) of the readout a = A_l h: an RMS norm with eps 1e-24 / R
ggml_tensor * dspine_graph::feature(ggml_tensor * readout) {
    return ggml_rms_norm(g.ctx0, readout, 1e-24f / (float) model.rank);
}

// ||h|| / sqrt(H), [1, n_tokens]
ggml_tensor * dspine_graph::row_norm(ggml_tensor * h) {
    return ggml_sqrt(g.ctx0, ggml_mean(g.ctx0, ggml_sqr(g.ctx0, h)));
}

dspine_graph::messages dspine_graph::project_predecessor(ggml_tensor * x) {
    return { g.build_lora_mm(model.w_message, x), g.build_lora_mm(model.w_pred, x) };
}

// of tokens: looked up where the file holds them, else made from the codes
dspine_graph::messages dspine_graph::messages_of(ggml_tensor * ids) {
    if (!model.folded) {
        return project_predecessor(code(ids));
    }
    ggml_tensor * both = ggml_get_rows(g.ctx0, model.folded, ids);
    auto half = [&](int64_t i) {
        return ggml_view_2d(g.ctx0, both, model.message, both->ne[1], both->nb[1], i * model.message * both->nb[0]);
    };
    return { half(0), half(1) };
}

// [message, n_blocks]. All tokens are looked up and the anchors' rows taken: a tensor of their few ids would end off a
// cache line, the allocator aligns to half of one, and all that follows would be read across two (a fifth of the time of
// the layers' products on AMX).
dspine_graph::messages dspine_graph::messages_of_anchors() {
    auto anchors = [&](ggml_tensor * t) {
        return ggml_view_2d(g.ctx0, t, t->ne[0], n_blocks, rows * t->nb[1], 0);
    };
    if (!model.folded) {
        return project_predecessor(ggml_cont(g.ctx0, anchors(code(tokens))));
    }
    const messages of_all = messages_of(tokens);
    return { anchors(of_all.value), anchors(of_all.gate) };
}

// rows [first, first + count) of every block of a [width, n_tokens] tensor: [width, count, n_blocks]
ggml_tensor * dspine_graph::rows_view(ggml_tensor * t, int64_t first, int64_t count) {
    return ggml_view_3d(g.ctx0, t, t->ne[0], count, n_blocks, t->nb[1], rows * t->nb[1], first * t->nb[1]);
}

// what row t of a block receives from row t-1, and row 1 from the anchor's code:
// [width, rows - 1, n_blocks] from [width, n_tokens] and [width, n_blocks]
ggml_tensor * dspine_graph::shift(ggml_tensor * of_rows, ggml_tensor * of_anchors) {
    ggml_tensor * first = ggml_view_3d(g.ctx0, of_anchors, of_anchors->ne[0], 1, n_blocks, of_anchors->nb[1], of_anchors->nb[1], 0);
    if (rows == 2) {
        return first;
    }
    return ggml_concat(g.ctx0, first, rows_view(of_rows, 1, rows - 2), 1);
}

// one node for message(), [message, n_tokens], where a backend computes it; adapters need the products apart
ggml_tensor * dspine_graph::fused_message(ggml_tensor * h, ggml_tensor * readout) {
    if (!fusion_allowed() || !g.loras->empty() || model.bias->type != GGML_TYPE_F32 ||
            model.w_receiver->type != model.w_message->type || model.w_pred->type != model.w_message->type) {
        return nullptr;
    }
    return if_fused(ggml_dspine_gate(g.ctx0, h, readout, anchor.value, anchor.gate,
            model.w_message, model.w_receiver, model.w_pred, model.bias, n_blocks));
}

// ||h||/sqrt(H) * sigmoid(W_r recv + W_p pred + b) * (W_m pred), zeros for the anchor rows: [message, n_tokens]
ggml_tensor * dspine_graph::message(ggml_tensor * recv, ggml_tensor * receiver, ggml_tensor * norm) {
    ggml_context * ctx0 = g.ctx0;
    const messages sent = project_predecessor(recv);
    ggml_tensor * gate  = ggml_sigmoid(ctx0, ggml_add(ctx0, shift(sent.gate, anchor.gate), rows_view(receiver, 1, rows - 1)));
    ggml_tensor * value = ggml_mul(ctx0, gate, shift(sent.value, anchor.value));
    value = ggml_mul(ctx0, value, rows_view(norm, 1, rows - 1));

    // the anchor rows get a message of zeros: cheaper than padding the n_embd-wide result
    value = ggml_pad_ext(ctx0, value, 0, 0, 1, 0, 0, 0, 0, 0);
    return ggml_reshape_2d(ctx0, value, model.message, g.n_tokens);
}

// write_l(h, recv, pred) = h + ||h||/sqrt(H) * O_l (sigmoid(W_r recv + W_p pred + b) * (W_m pred))
ggml_tensor * dspine_graph::inject(ggml_tensor * h, int il) {
    if (!model.enabled() || rows < 2) {
        return h;
    }
    ggml_context * ctx0 = g.ctx0;

    ggml_tensor * readout  = g.build_lora_mm(model.layers[il].readout, h);
    ggml_tensor * gated    = fused_message(h, readout);
    ggml_tensor * norm     = nullptr;
    ggml_tensor * receiver = nullptr;
    ggml_tensor * value    = nullptr;
    if (gated) {
        auto plane = [&](int64_t i) {
            return ggml_view_2d(ctx0, gated, gated->ne[0], gated->ne[1], gated->nb[1], i * gated->nb[2]);
        };
        value    = plane(0);
        receiver = plane(1);
        g.cb(gated, "dspine_gated", il);
    } else {
        ggml_tensor * recv = feature(readout);
        receiver = ggml_add(ctx0, g.build_lora_mm(model.w_receiver, recv), model.bias);
        norm     = row_norm(h);
        value    = message(recv, receiver, norm);
    }

    g.cb(h, "dspine_pre_injection", il);
    ggml_tensor * out = ggml_add(ctx0, h, g.build_lora_mm(model.layers[il].write, value));
    if (il == (int) model.layers.size() - 1) {
        last_hidden   = h;
        last_receiver = receiver;
        last_norm     = norm;
        last_gated    = gated;
        last_message  = value;
        last_written  = out;
    }
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
        return ggml_view_4d(ctx0, t, t->ne[0], top_k, n_pos, n_blocks, t->nb[1], top_k * t->nb[1], n_pos * top_k * t->nb[1], 0);
    };

    const messages sent = messages_of(prev);
    ggml_tensor * norm  = last_norm ? last_norm : row_norm(last_hidden);
    ggml_tensor * gate  = ggml_sigmoid(ctx0, ggml_add(ctx0, per_pair(sent.gate), per_position(last_receiver)));
    ggml_tensor * value = ggml_mul(ctx0, gate, per_pair(sent.value));
    value = ggml_mul(ctx0, value, per_position(norm));

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

// one node for pair_scores() and pack(), where a backend computes it
ggml_tensor * dspine_graph::fused_lattice(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * norm_weight) {
    if (!last_gated || scored < 2 || norm_weight->type != GGML_TYPE_F32) {
        return nullptr;
    }
    messages sent = {};
    if (scored > 2) {
        const int64_t n_pos = scored - 2;
        sent = messages_of(ggml_reshape_1d(g.ctx0, ggml_cont(g.ctx0, rows_view(candidates, 1, n_pos)),
                candidates->ne[0] * n_pos * n_blocks));
    }
    return if_fused(ggml_dspine_cache(g.ctx0, head, norm_weight, model.layers.back().write, last_hidden, last_gated,
            sent.value, sent.gate, candidates, g.res->t_logits, n_blocks, scored, g.norm_rms_eps));
}

ggml_tensor * dspine_graph::composed_lattice(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight) {
    ggml_context * ctx0 = g.ctx0;
    const int64_t top_k = candidates->ne[0];
    ggml_tensor * logits = g.res->t_logits;

    ggml_tensor * packed = ggml_fill(ctx0, ggml_new_tensor_3d(ctx0, GGML_TYPE_F32, g.n_embd, 1, n_blocks), 0.0f);
    if (scored > 1) {
        ggml_tensor * ids = ggml_cast(ctx0, candidates, GGML_TYPE_F32);
        // the first draft has one predecessor, the anchor, already written into row 1: its scores are row 1's own logits
        ggml_tensor * column = ggml_reshape_3d(ctx0, logits, 1, logits->ne[0], g.n_tokens);
        ggml_tensor * own    = ggml_reshape_2d(ctx0, ggml_get_rows(ctx0, column, candidates), top_k, g.n_tokens);
        ggml_tensor * first  = ggml_repeat_4d(ctx0, rows_view(own, 1, 1), top_k, top_k, n_blocks, 1);
        packed = ggml_concat(ctx0, packed, pack(ids, first, 1, 1), 1);
        if (scored > 2) {
            const auto table = model.head_tables.find(head);
            ggml_tensor * scores = table != model.head_tables.end()
                ? table_scores(*table->second, candidates, own, head_scale)
                : pair_scores(candidates, head, head_scale, norm_weight);
            packed = ggml_concat(ctx0, packed, pack(ids, scores, 2, scored - 2), 1);
        }
    }
    if (scored < rows) {
        packed = ggml_pad(ctx0, packed, 0, rows - scored, 0, 0);
    }
    return ggml_reshape_2d(ctx0, packed, g.n_embd, g.n_tokens);
}

void dspine_graph::lattice(ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight) {
    if (!model.enabled()) {
        return;
    }
    ggml_tensor * logits = g.res->t_logits;
    GGML_ASSERT(logits->ne[1] == g.n_tokens);

    ggml_tensor * candidates = ggml_top_k(g.ctx0, logits, g.hparams.dflash_selector_top_k);
    // the fused cache knows no scale of the head, and reads its rows
    const bool composed = head_scale || model.head_tables.count(head);
    ggml_tensor * packed = composed ? nullptr : fused_lattice(candidates, head, norm_weight);
    if (!packed) {
        packed = composed_lattice(candidates, head, head_scale, norm_weight);
    }
    g.cb(packed, "dspine_lattice", -1);
    g.res->t_h_nextn = packed;
    ggml_build_forward_expand(g.gf, packed);
}
