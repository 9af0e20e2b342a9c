// Weights and hyper-parameters that a DSpine drafter adds to the dflash architecture.
// Included by upstream's llama-model.h, so it names ggml types only.
#pragma once

#include "llama.h"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

struct dspine_head_table;
struct ggml_tensor;
struct llama_model_loader;
struct llama_model_base;

struct dspine_layer {
    ggml_tensor * readout = nullptr; // A_l, ggml shape [n_embd, rank]
    ggml_tensor * write   = nullptr; // O_l, ggml shape [message, n_embd]
};

// Empty (rank == 0) for every other model.
struct dspine_model {
    uint32_t rank    = 0; // R, width of a token code and of a feature
    uint32_t message = 0; // M, width of a message

    // one of the two: the codes, or what the predecessor terms make of them
    ggml_tensor * codes       = nullptr; // C,   [rank, n_vocab], rows of unit length
    ggml_tensor * folded      = nullptr; // [2*message, n_vocab], per token W_m sqrt(R) C[v], then W_p sqrt(R) C[v]
    ggml_tensor * w_message   = nullptr; // W_m, [rank, message]
    ggml_tensor * w_receiver  = nullptr; // W_r, [rank, message]
    ggml_tensor * w_pred      = nullptr; // W_p, [rank, message]
    ggml_tensor * bias        = nullptr; // b,   [message]

    std::vector<dspine_layer> layers;

    // by output projection; made when a pair is checked, see dspine-head-table.h
    mutable std::map<const ggml_tensor *, std::shared_ptr<const dspine_head_table>> head_tables;

    bool enabled() const { return rank > 0; }

    // the table with a row per token
    const ggml_tensor * table() const { return folded ? folded : codes; }
};

// Reads dflash.transfer_rank and dflash.message_size; leaves `dst` empty when the file has neither.
// Throws std::runtime_error, naming the key and the limit, for a file that the graph cannot run.
void dspine_load_hparams(llama_model_loader & ml, const struct llama_hparams & hparams, dspine_model & dst);

// Creates the tensors of `dst` (a member of `model`); does nothing when it is empty.
void dspine_load_tensors(llama_model_base & model, dspine_model & dst);
