#include "dspine-common.h"
#include "dspine-head-table.h"
#include "dspine-pair.h"

#include "common.h"
#include "gguf.h"
#include "ggml-cpp.h"
#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

// the smallest ubatch that keeps the injection of long prompts efficient
static constexpr int32_t DRAFT_UBATCH = 128;

static constexpr const char * DRAFT_SUFFIX = ".draft";

// block size of the DSpine drafter in `path`; 0 for every other file, and for none
static int32_t read_block_size(const std::string & path) {
    if (path.empty()) {
        return 0;
    }
    gguf_context_ptr gguf { gguf_init_from_file(path.c_str(), { /*.no_alloc =*/ true, /*.ctx =*/ nullptr }) };
    if (!gguf || gguf_find_key(gguf.get(), "dflash.transfer_rank") < 0) {
        return 0;
    }
    const int64_t key = gguf_find_key(gguf.get(), "dflash.block_size");
    if (key < 0 || gguf_get_kv_type(gguf.get(), key) != GGUF_TYPE_UINT32) {
        throw std::invalid_argument("error: " + path + ": a DSpine drafter without dflash.block_size\n");
    }
    return (int32_t) gguf_get_val_u32(gguf.get(), key);
}

// DSpine shares DFlash's type; types that need no model may stand before it
static void resolve_type(common_params_speculative & spec, const std::string & path) {
    auto has = [&](common_speculative_type type) {
        return std::find(spec.types.begin(), spec.types.end(), type) != spec.types.end();
    };
    for (const auto type : { COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE, COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3,
                             COMMON_SPECULATIVE_TYPE_DRAFT_MTP,    COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK }) {
        if (has(type)) {
            throw std::invalid_argument("error: --spec-type " + common_speculative_type_to_str(type) + ": " + path +
                    " is a DSpine drafter, which is draft-dflash (leave --spec-type out to let the file decide)\n");
        }
    }
    if (!has(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH)) {
        spec.types.push_back(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH);
    }
    spec.types.erase(std::remove(spec.types.begin(), spec.types.end(), COMMON_SPECULATIVE_TYPE_NONE), spec.types.end());
}

static void resolve_depth(common_params_speculative_draft & draft, int32_t block_size) {
    const int32_t deepest = block_size - 1;
    if (!draft.n_max_given) {
        draft.n_max = deepest;
        LOG_INF("dspine: drafting %d tokens a round (block size %d - 1; --spec-draft-n-max sets another depth)\n", deepest, block_size);
    }
    for (int32_t * n : { &draft.n_max, &draft.n_min }) {
        if (*n > deepest) {
            LOG_WRN("dspine: %s %d exceeds the block size %d, using %d\n",
                    n == &draft.n_max ? "--spec-draft-n-max" : "--spec-draft-n-min", *n, block_size, deepest);
            *n = deepest;
        }
    }
    if (draft.n_min > draft.n_max) {
        LOG_WRN("dspine: --spec-draft-n-min %d exceeds the depth, using %d\n", draft.n_min, draft.n_max);
        draft.n_min = draft.n_max;
    }
}

// A verification is one row more than the draft. The server puts those of all slots into one batch, and a recurrent
// target keeps the rows of one slot in one ubatch.
static void make_room_to_verify(common_params & params) {
    const int32_t longest = common_speculative_n_max(&params.speculative);
    const int32_t ubatch  = params.speculative.draft.n_max + 2;
    const int32_t batch   = std::max(ubatch, std::max(params.n_parallel, 1) * (longest + 1));
    if (params.n_batch < batch || params.n_ubatch < ubatch) {
        params.n_batch  = std::max(params.n_batch, batch);
        params.n_ubatch = std::max(params.n_ubatch, ubatch);
        LOG_WRN("dspine: -b or -ub cannot hold the verifications of %d slot(s), using -b %d -ub %d\n",
                params.n_parallel, params.n_batch, params.n_ubatch);
    }
}

static void keep_head_rows(std::vector<llama_model_kv_override> & overrides) {
    llama_model_kv_override keep = {};
    std::strcpy(keep.key, DSPINE_KEEP_HEAD_ROWS);
    keep.tag      = LLAMA_KV_OVERRIDE_TYPE_BOOL;
    keep.val_bool = true;
    if (overrides.empty()) {
        overrides.emplace_back().key[0] = 0; // the list ends with an empty key
    }
    overrides.insert(overrides.begin(), keep);
}

static void use_one_slot(common_params & params) {
    LOG_INF("dspine: using 1 slot (each slot has its own draft state and verify rows; -np sets another count)\n");
    params.n_parallel = 1;
    params.speculative.draft.np_auto = false;
}

void dspine_resolve_params(common_params & params) {
    auto & draft = params.speculative.draft;
    const int32_t block_size = draft.is_dspine ? 0 : read_block_size(draft.mparams.path);
    if (block_size < 2) {
        return;
    }
    if (draft.n_max_given && draft.n_max == 0) {
        LOG_WRN("dspine: --spec-draft-n-max 0: %s is not loaded, nothing is drafted\n", draft.mparams.path.c_str());
        draft.mparams = {};
        params.speculative.types = { COMMON_SPECULATIVE_TYPE_NONE };
        return;
    }
    draft.is_dspine = true;
    resolve_type(params.speculative, draft.mparams.path);
    resolve_depth(draft, block_size);
    if (draft.np_auto) {
        use_one_slot(params);
    }
    make_room_to_verify(params);
    if (dspine_head_table_type() == GGML_TYPE_COUNT) {
        keep_head_rows(params.kv_overrides);
    }
}

void dspine_auto_slots(common_params & params) {
    auto & draft = params.speculative.draft;
    draft.np_auto = true;
    if (read_block_size(draft.mparams.path) > 0) {
        use_one_slot(params);
    }
}

void dspine_save_slot(llama_context * ctx_dft, const std::string & path, int32_t seq) {
    if (ctx_dft && llama_state_seq_save_file(ctx_dft, (path + DRAFT_SUFFIX).c_str(), seq, nullptr, 0) == 0) {
        LOG_WRN("dspine: %s%s could not be written: after a restore the drafter starts without this prompt\n", path.c_str(), DRAFT_SUFFIX);
    }
}

void dspine_restore_slot(llama_context * ctx_dft, const std::string & path, int32_t seq) {
    if (!ctx_dft) {
        return;
    }
    llama_token no_token; // without a place for tokens only their count would be read
    size_t n_tokens = 0;
    const std::string file = path + DRAFT_SUFFIX;
    llama_memory_seq_rm(llama_get_memory(ctx_dft), seq, -1, -1);
    if (!std::ifstream(file).good() || llama_state_seq_load_file(ctx_dft, file.c_str(), seq, &no_token, 0, &n_tokens) == 0) {
        llama_memory_seq_rm(llama_get_memory(ctx_dft), seq, -1, -1);
        LOG_WRN("dspine: no usable %s: drafts of this slot start without the restored prompt\n", file.c_str());
    }
}

void dspine_size_draft_batch(const common_params & params, common_params & result) {
    const auto & draft = params.speculative.draft;
    if (draft.n_ubatch <= 0 && !draft.is_dspine) {
        return;
    }
    // upstream splits a batch that exceeds the ubatch, and half a block drafts wrong tokens
    const int32_t needed = params.n_parallel * (draft.n_max + 1);
    result.n_ubatch = draft.n_ubatch > 0 ? draft.n_ubatch : DRAFT_UBATCH;
    if (result.n_ubatch < needed) {
        if (draft.n_ubatch > 0) {
            LOG_WRN("dspine: --spec-draft-ubatch %d cannot hold one draft of %d slot(s) x %d rows, using %d\n",
                    draft.n_ubatch, params.n_parallel, draft.n_max + 1, needed);
        }
        result.n_ubatch = needed;
    }
    result.n_batch = std::max(result.n_batch, result.n_ubatch);
}
