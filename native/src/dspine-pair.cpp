#include "dspine-pair.h"
#include "dspine-head-table.h"

#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <utility>
#include <vector>

uint64_t dspine_vocab_hash(const llama_vocab * vocab) {
    uint64_t hash = 0xcbf29ce484222325ull;
    auto add = [&](uint8_t byte) {
        hash = (hash ^ byte) * 0x100000001b3ull;
    };
    const int32_t n_tokens = llama_vocab_n_tokens(vocab);
    for (int32_t id = 0; id < n_tokens; ++id) {
        // llama.cpp also marks control tokens with "unused" in their text; those count
        const int attr = llama_vocab_get_attr(vocab, id);
        if ((attr & LLAMA_TOKEN_ATTR_UNUSED) && !(attr & LLAMA_TOKEN_ATTR_CONTROL)) {
            continue;
        }
        for (int shift = 0; shift < 32; shift += 8) {
            add((uint8_t) ((uint32_t) id >> shift));
        }
        for (const char * c = llama_vocab_get_text(vocab, id); *c; ++c) {
            add((uint8_t) *c);
        }
        add(0);
    }
    return hash;
}

static std::string meta(const llama_model * model, const char * key) {
    const auto it = model->gguf_kv.find(key);
    return it == model->gguf_kv.end() ? "" : it->second;
}

// the target as the drafter's file describes it
static std::string partner_name(const llama_model * model_dft) {
    const std::string name = meta(model_dft, "dspine.target.name");
    return name.empty() ? meta(model_dft, "dspine.target.architecture") : name;
}

static std::string check_fingerprint(const llama_model * model_tgt, const llama_model * model_dft) {
    const llama_vocab * vocab = llama_model_get_vocab(model_tgt);
    char hash[17];
    snprintf(hash, sizeof(hash), "%016llx", (unsigned long long) dspine_vocab_hash(vocab));

    const struct { const char * key; const char * what; std::string found; } facts[] = {
        { "dspine.target.architecture",     "architecture",    model_tgt->arch_name() },
        { "dspine.target.embedding_length", "hidden size",     std::to_string(model_tgt->hparams.n_embd) },
        { "dspine.target.block_count",      "layer count",     std::to_string(model_tgt->hparams.n_layer()) },
        { "dspine.target.vocab_size",       "vocabulary size", std::to_string(llama_vocab_n_tokens(vocab)) },
        { "dspine.target.tokens_fnv1a64",   "token list hash", hash },
    };
    for (const auto & fact : facts) {
        const std::string expected = meta(model_dft, fact.key);
        if (!expected.empty() && expected != fact.found) {
            return "it was converted for the target '" + partner_name(model_dft) + "' with " + fact.what + " " + expected +
                ", this target has " + fact.found;
        }
    }
    return "";
}

std::string dspine_check_taps(llama_context * ctx_tgt, const std::vector<int32_t> & layers) {
    const llama_model * model_tgt = llama_get_model(ctx_tgt);
    const int32_t n_layer = (int32_t) model_tgt->hparams.n_layer();
    const llm_graph_result * built = ctx_tgt->get_gf_res_reserve();

    for (const int32_t layer : layers) {
        if (layer < 1 || layer > n_layer) {
            return "layer input " + std::to_string(layer) + " is to be read, the target has 1 to " + std::to_string(n_layer);
        }
        // the graph that the context has just reserved tells which layer inputs this architecture publishes
        if (built && !built->get_layer_inp(layer)) {
            return "the target architecture '" + model_tgt->arch_name() + "' does not publish the input of layer " +
                std::to_string(layer) + (layer == n_layer ? " (the output of its last layer)" : "");
        }
    }
    return "";
}

static bool rows_can_be_gathered(ggml_tensor * head) {
    ggml_context_ptr ctx { ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }) };
    ggml_tensor * ids = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 1);
    ggml_tensor * op  = ggml_get_rows(ctx.get(), head, ids);

    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(head->buffer));
    if (!dev) {
        dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); // memory-mapped weights have no device of their own
    }
    return dev && ggml_backend_dev_supports_op(dev, op);
}

static std::string unreadable_head(const llama_model * model_dft, const ggml_tensor * head) {
    char mib[32];
    snprintf(mib, sizeof(mib), "%.0f", std::ceil(dspine_head_table_bytes(*model_dft, head, GGML_TYPE_F16) / 1048576.0));
    return std::string("rows of the target's head (") + ggml_type_name(head->type) + " in a " +
        ggml_backend_buffer_name(head->buffer) + " buffer) cannot be read; set DSPINE_HEAD_TABLE=f16 to do without (" + mib +
        " MiB), or load the target with --no-repack, or with -sm layer on several GPUs";
}

static std::string check_head(llama_context * ctx_tgt, const llama_model * model_dft) {
    const llama_model * model_tgt = llama_get_model(ctx_tgt);
    if (!model_tgt->tok_embd || !model_tgt->output) {
        return "the target architecture '" + model_tgt->arch_name() + "' has no token embeddings or no output projection to share";
    }
    ggml_tensor * head = model_dft->output ? model_dft->output : model_tgt->output;
    const int64_t n_codes = model_dft->dspine.table()->ne[1];
    if (head->ne[1] != n_codes) {
        return "it has codes for " + std::to_string(n_codes) + " tokens, the target's head has " + std::to_string(head->ne[1]) + " rows";
    }
    const ggml_type type = dspine_head_table_type();
    model_dft->dspine.head_tables.erase(head); // of an earlier target at the same place
    if (head->buffer && type != GGML_TYPE_COUNT) {
        model_dft->dspine.head_tables[head] = dspine_make_head_table(*model_dft, head, type, llama_n_threads_batch(ctx_tgt));
        return "";
    }
    return head->buffer && !rows_can_be_gathered(head) ? unreadable_head(model_dft, head) : "";
}

static std::string find_misfit(llama_context * ctx_tgt, const llama_model * model_dft) {
    const llama_model * model_tgt = llama_get_model(ctx_tgt);
    if (model_tgt->hparams.n_embd != model_dft->hparams.n_embd) {
        return "hidden size " + std::to_string(model_dft->hparams.n_embd) + ", the target has " + std::to_string(model_tgt->hparams.n_embd);
    }
    std::string why = check_fingerprint(model_tgt, model_dft);
    if (why.empty()) {
        why = dspine_check_taps(ctx_tgt, model_dft->target_layer_ids);
    }
    if (!why.empty()) {
        return why;
    }
    try {
        return check_head(ctx_tgt, model_dft);
    } catch (const std::exception & e) {
        return e.what();
    }
}

static thread_local std::string last_misfit;

std::string dspine_take_misfit() {
    return std::exchange(last_misfit, {});
}

std::string dspine_check_pair(llama_context * ctx_tgt, const llama_model * model_dft) {
    last_misfit = model_dft->dspine.enabled() ? find_misfit(ctx_tgt, model_dft) : "";
    return last_misfit;
}
