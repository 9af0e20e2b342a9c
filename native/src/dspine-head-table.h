// Scores of the transition cache without rows of the target's head: for heads whose rows cannot be gathered, or that
// are to stay where the target computes fastest. Opt-in, DSPINE_HEAD_TABLE=f16 or f32: the table takes memory.
//
// With T = lm_head diag(norm) O, u_t the message written into row t, h_t the row after it, u_k that of predecessor k
// and du = u_k - u_t, the logits of the written row give the scores of every other message (an exact rearrangement
// of score_t in dspine-graph.cpp; ms = mean square plus eps, G = O^T O):
//   score[k, j] = (logit_t[j] sqrt(ms(h_t)) + T_j . du) / sqrt(ms(h_t) + du . (2 O^T h_t + G du) / H)
#pragma once

#include "llama.h"
#include "ggml-cpp.h"

#include <memory>
#include <vector>

struct dspine_head_table {
    ggml_tensor * rows    = nullptr; // T,   [message, n_vocab], F16 or F32; on the device of the head
    ggml_tensor * write_t = nullptr; // O^T, [n_embd, message],  F32; on the device of the drafter's last layer
    ggml_tensor * gram    = nullptr; // G,   [message, message], F32; beside write_t

    std::vector<ggml_context_ptr>        contexts;
    std::vector<ggml_backend_buffer_ptr> buffers;
};

// What DSPINE_HEAD_TABLE asks for: F16 or F32, GGML_TYPE_COUNT when it is not set, empty or "off".
// Throws std::invalid_argument for any other value.
LLAMA_API ggml_type dspine_head_table_type();

// Bytes of T for a head [n_embd, n_vocab].
size_t dspine_head_table_bytes(const struct llama_model & model_dft, const ggml_tensor * head, ggml_type type);

// Computes the table of a loaded drafter and a head, on the devices where they lie; any type and buffer that a product
// is possible with. Beside the table it needs up to 64 MiB there while it is made, and where the device widens a float
// head for a product (CUDA, F16 and BF16) the head in F32. Throws std::runtime_error, naming device and size.
std::shared_ptr<const dspine_head_table> dspine_make_head_table(const struct llama_model & model_dft, ggml_tensor * head,
        ggml_type type, int32_t n_threads);
