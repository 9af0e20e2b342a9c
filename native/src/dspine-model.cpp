#include "dspine-model.h"

#include "llama-model.h"
#include "llama-model-loader.h"

#include <stdexcept>
#include <string>

static void require(bool ok, const std::string & what) {
    if (!ok) {
        throw std::runtime_error("DSpine drafter: " + what);
    }
}

void dspine_load_hparams(llama_model_loader & ml, const llama_hparams & hparams, dspine_model & dst) {
    if (!ml.get_key(std::string("dflash.transfer_rank"), dst.rank, false)) {
        return;
    }
    require(dst.rank > 0, "dflash.transfer_rank is 0");
    ml.get_key(std::string("dflash.message_size"), dst.message, true);
    require(dst.message > 0, "dflash.message_size is 0");

    const uint32_t top_k = hparams.dflash_selector_top_k;
    require(top_k > 0, "dflash.selector_top_k is missing or 0");
    require(hparams.dflash_block_size >= 2, "dflash.block_size is " + std::to_string(hparams.dflash_block_size) +
            ", expected at least 2");

    // the K ids and K*K scores of one position travel in one row of the nextn output
    require(hparams.n_embd >= top_k * (top_k + 1), "hidden size " + std::to_string(hparams.n_embd) +
            " cannot hold K*(K+1) = " + std::to_string(top_k * (top_k + 1)) + " values for K = " + std::to_string(top_k));
}

// the loader refuses a file with tensors that nobody asked for, so both names are asked for
static void load_table(llama_model_base & model, dspine_model & dst, int64_t n_vocab) {
    const LLM_TN & tn = model.tn;
    dst.codes  = model.create_tensor(tn(LLM_TENSOR_DSPINE_CODES,  "weight"), { dst.rank,        n_vocab }, llama_model_loader::TENSOR_NOT_REQUIRED);
    dst.folded = model.create_tensor(tn(LLM_TENSOR_DSPINE_FOLDED, "weight"), { 2 * (int64_t) dst.message, n_vocab }, llama_model_loader::TENSOR_NOT_REQUIRED);
    require(dst.codes || dst.folded, "missing tensor: transfer_codes.weight or transfer_folded.weight expected, neither found");
    require(!dst.codes || !dst.folded, "transfer_codes.weight or transfer_folded.weight expected, both found");
}

void dspine_load_tensors(llama_model_base & model, dspine_model & dst) {
    if (!dst.enabled()) {
        return;
    }
    const int64_t n_embd  = model.hparams.n_embd;
    const int64_t n_vocab = model.vocab.n_tokens();
    const int64_t rank    = dst.rank;
    const int64_t message = dst.message;
    const LLM_TN & tn     = model.tn;

    // ids travel as floats in the lattice
    require(n_vocab <= (1 << 24), "vocabulary of " + std::to_string(n_vocab) + " exceeds 2^24");

    load_table(model, dst, n_vocab);
    dst.w_message  = model.create_tensor(tn(LLM_TENSOR_DSPINE_MESSAGE,     "weight"), { rank, message }, 0);
    dst.w_receiver = model.create_tensor(tn(LLM_TENSOR_DSPINE_RECEIVER,    "weight"), { rank, message }, 0);
    dst.w_pred     = model.create_tensor(tn(LLM_TENSOR_DSPINE_PREDECESSOR, "weight"), { rank, message }, 0);
    dst.bias       = model.create_tensor(tn(LLM_TENSOR_DSPINE_GATE,        "bias"),   { message },       0);

    dst.layers.resize(model.hparams.n_layer());
    for (size_t il = 0; il < dst.layers.size(); ++il) {
        dst.layers[il].readout = model.create_tensor(tn(LLM_TENSOR_DSPINE_READOUT, "weight", (int) il), { n_embd, rank },    0);
        dst.layers[il].write   = model.create_tensor(tn(LLM_TENSOR_DSPINE_WRITE,   "weight", (int) il), { message, n_embd }, 0);
    }

    LLAMA_LOG_INFO("%s: DSpine block = %u, top-k = %u, transfer rank = %u, message size = %u, %s\n", __func__,
            model.hparams.dflash_block_size, model.hparams.dflash_selector_top_k, dst.rank, dst.message,
            dst.folded ? "folded table" : "codes");
}
