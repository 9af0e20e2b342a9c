// The two parts that DSpine adds to the dflash decoder graph (reference: the method's sections
// on adjacent injection and on the transition cache; formulas are repeated above each function).
#pragma once

#include "dspine-model.h"

struct llm_graph_context;

// Builds the DSpine nodes of one decoder graph. Inert for every other dflash model.
//
// The gate of an injection and the transition cache are one node each (dspine-ops.h) where the backend that holds
// their weights computes them, and composed of stock operations elsewhere, or everywhere with DSPINE_FUSED=0.
//
// Rows come block by block: n_tokens = n_blocks * rows, row 0 of a block is its anchor.
class dspine_graph {
public:
    dspine_graph(llm_graph_context & g, const dspine_model & model, ggml_tensor * tokens);

    // h: the output of decoder layer `il`, [n_embd, n_tokens]. Returns it with the adjacent
    // injection applied to every row but the anchors; the same tensor when inert.
    ggml_tensor * inject(ggml_tensor * h, int il);

    // Packs [K ids, K*K scores, 0...] per row into the nextn output, as DFlash2's lattice does, for the
    // walk in common/speculative.cpp. head: the output projection, [n_embd, n_vocab], whose rows can
    // be gathered unless it has a head table; head_scale: its scalar scale or nullptr. Does nothing when inert.
    void lattice(ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight);

private:
    // what W_m, W_p make of predecessors: both [message, n], rows may be strided
    struct messages {
        ggml_tensor * value;
        ggml_tensor * gate;
    };

    messages      project_predecessor(ggml_tensor * x);
    messages      messages_of(ggml_tensor * ids); // [n]
    messages      messages_of_anchors();
    ggml_tensor * code(ggml_tensor * ids);
    ggml_tensor * feature(ggml_tensor * readout);
    ggml_tensor * row_norm(ggml_tensor * h);
    ggml_tensor * if_fused(ggml_tensor * node);
    ggml_tensor * fused_message(ggml_tensor * h, ggml_tensor * readout);
    ggml_tensor * message(ggml_tensor * recv, ggml_tensor * receiver, ggml_tensor * norm);
    ggml_tensor * fused_lattice(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * norm_weight);
    ggml_tensor * composed_lattice(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight);
    ggml_tensor * shift(ggml_tensor * of_rows, ggml_tensor * of_anchors);
    ggml_tensor * rows_view(ggml_tensor * t, int64_t first, int64_t count);
    ggml_tensor * pair_scores(ggml_tensor * candidates, ggml_tensor * head, ggml_tensor * head_scale, ggml_tensor * norm_weight);
    ggml_tensor * table_scores(const dspine_head_table & table, ggml_tensor * candidates, ggml_tensor * logits, ggml_tensor * head_scale);
    ggml_tensor * pack(ggml_tensor * ids, ggml_tensor * scores, int64_t first, int64_t count);

    llm_graph_context  & g;
    const dspine_model & model;
    ggml_tensor        * tokens;

    int64_t n_blocks = 0;
    int64_t rows     = 0; // per block, the anchor included
    int64_t scored   = 0; // rows per block that the lattice covers

    messages anchor = {};                // of the anchors' codes, [message, n_blocks]
    ggml_tensor * last_hidden   = nullptr; // pre-injection rows of the last layer
    ggml_tensor * last_receiver = nullptr; // their W_r * feature + b
    ggml_tensor * last_norm     = nullptr; // their ||h|| / sqrt(n_embd), [1, n_tokens]; nullptr after a fused gate
    ggml_tensor * last_gated    = nullptr; // their fused gate, or nullptr
    ggml_tensor * last_message  = nullptr; // what is written into them, [message, n_tokens]
    ggml_tensor * last_written  = nullptr; // the rows after it
};
