// Load-time checks of a drafter against its target. Every refusal is one line of text.
#pragma once

#include "llama.h"
#include "ggml-backend.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// Key of a model kv-override: asks the loader to keep the rows of the output projection gatherable.
#define DSPINE_KEEP_HEAD_ROWS "dspine.keep_head_rows"

// FNV-1a (64 bit) over (id as 4 little-endian bytes, text, 0) of every token that is not marked
// unused: converters differ in how they pad the vocabulary, and padding is marked so.
LLAMA_API uint64_t dspine_vocab_hash(const struct llama_vocab * vocab);

// Empty when `ctx_tgt` publishes the inputs of these layers (1 to the number of layers); else which it does not.
LLAMA_API std::string dspine_check_taps(struct llama_context * ctx_tgt, const std::vector<int32_t> & layers);

// Empty when `model_dft` can draft for `ctx_tgt`, or is no DSpine drafter; else what does not fit.
LLAMA_API std::string dspine_check_pair(struct llama_context * ctx_tgt, const struct llama_model * model_dft);

// What the last dspine_check_pair of this thread returned, once: for callers that see only a missing model.
LLAMA_API std::string dspine_take_misfit();

// Where the loader puts an output projection whose rows must be gatherable: `chosen` when its rows can
// be, else the first buffer type for which `gathers` holds on the same device, else `chosen`.
// list: pairs of device and buffer type, in the loader's order of preference.
template <typename List>
ggml_backend_buffer_type_t dspine_head_buft(ggml_backend_buffer_type_t chosen, const List & list,
        const std::function<bool(ggml_backend_dev_t, ggml_backend_buffer_type_t)> & gathers) {
    ggml_backend_dev_t device = nullptr;
    for (const auto & [dev, buft] : list) {
        if (buft == chosen) {
            device = dev;
        }
    }
    if (!device || gathers(device, chosen)) {
        return chosen;
    }
    for (const auto & [dev, buft] : list) {
        if (dev == device && gathers(dev, buft)) {
            return buft;
        }
    }
    return chosen;
}
