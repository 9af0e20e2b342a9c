#include "pair.h"

#include "dspine-common.h"
#include "dspine-pair.h"
#include "generate.h"
#include "llama-ext.h"
#include "llama-model.h"
#include "log.h"

#include <algorithm>

namespace {

thread_local std::string last_error;
thread_local std::string first_log_error; // of the load in progress: llama.cpp tells reasons to its log alone

std::string logged_reason() {
    std::string text = first_log_error;
    for (const char * prefix : { "llama_model_load: ", "error loading model: ", "llama_init_from_model: " }) {
        if (text.rfind(prefix, 0) == 0) {
            text.erase(0, std::strlen(prefix));
        }
    }
    while (!text.empty() && text.back() == '\n') {
        text.pop_back();
    }
    return text.empty() ? "" : ": " + text;
}

} // namespace

void set_last_error(const std::string & text) { last_error = text; }

dspine_pair::dspine_pair() = default;

dspine_pair::~dspine_pair() {
    speculative.reset();
    if (borrowed) {
        for (const int32_t layer : taps) {
            llama_set_embeddings_layer_inp(borrowed, (uint32_t) layer, false);
        }
    }
}

void dspine_pair::forget_results() {
    batch.clear();
    drafts.clear();
    captured.clear();
}

void dspine_pair::forget_generation(int32_t seq) {
    if (seq == 0) {
        running.reset();
        cached.clear();
    }
}

void dspine_pair::need_room(int32_t pos0, int32_t n) const {
    const int64_t n_ctx = llama_n_ctx_seq(ctx_tgt());
    require(pos0 >= 0 && (int64_t) pos0 + n <= n_ctx, "positions " + std::to_string(pos0) + " to " +
            std::to_string((int64_t) pos0 + n - 1) + " lie outside a context of " + std::to_string(n_ctx));
}

void dspine_pair::need_seq(int32_t seq) const {
    require(seq >= 0 && seq < params.n_parallel, "sequence " + std::to_string(seq) + " is outside 0.." +
            std::to_string(params.n_parallel - 1));
}

void dspine_pair::need_token(int32_t id) const {
    require(id >= 0 && id < n_vocab(), "token " + std::to_string(id) + " is outside the vocabulary of " + std::to_string(n_vocab()));
}

namespace {

bool wanted(const ggml_tensor * t) {
    const char * name = t->name;
    if (std::strchr(name, ' ') || !ggml_is_contiguous(t)) {
        return false; // "<name> (view)" is a part of a tensor
    }
    for (const char * prefix : { "dspine_pre_injection-", "dspine_post_injection-", "result_norm", "result_output" }) {
        if (std::strncmp(name, prefix, std::strlen(prefix)) == 0) {
            return true;
        }
    }
    return false;
}

bool capture_tensor(ggml_tensor * t, bool ask, void * user) {
    if (ask || !wanted(t)) {
        return wanted(t);
    }
    auto & values = static_cast<dspine_pair *>(user)->captured[t->name];
    values.resize(ggml_nelements(t));
    ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
    return true;
}

void check_params(const dspine_params & p) {
    require(p.size == sizeof(dspine_params), "dspine_params has " + std::to_string(p.size) + " bytes, this library expects " +
            std::to_string(sizeof(dspine_params)));
    require(p.n_seq >= 1 && p.n_batch >= 1 && p.n_ubatch >= 1, "n_seq, n_batch and n_ubatch must be at least 1");
    require(p.n_ctx >= 0 && p.n_draft >= 0 && p.n_draft_ubatch >= 0, "n_ctx, n_draft and n_draft_ubatch must not be negative");
    require(p.n_seq <= (int32_t) llama_max_parallel_sequences(), "n_seq " + std::to_string(p.n_seq) + " exceeds " +
            std::to_string(llama_max_parallel_sequences()));
    require(p.flash_attn >= LLAMA_FLASH_ATTN_TYPE_AUTO && p.flash_attn <= LLAMA_FLASH_ATTN_TYPE_ENABLED, "flash_attn must be -1, 0 or 1");
    require(p.p_min >= 0.0f && p.p_min <= 1.0f, "p_min must lie between 0 and 1");
    for (const int32_t type : { p.type_k, p.type_v, p.type_k_draft, p.type_v_draft }) {
        // types that were removed keep their number and have no block size
        require(type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type) > 0, "cache type " + std::to_string(type) + " is no ggml_type");
    }
}

void set_drafter_params(common_params & c, const char * draft, const dspine_params & p) {
    auto & d       = c.speculative.draft;
    d.mparams.path = draft;
    d.n_gpu_layers = p.n_gpu_layers_draft;
    d.cache_type_k = (ggml_type) p.type_k_draft;
    d.cache_type_v = (ggml_type) p.type_v_draft;
    d.n_ubatch     = p.n_draft_ubatch;
    d.p_min        = p.p_min;
    d.n_max_given  = p.n_draft > 0;
    d.n_max        = p.n_draft;
    try {
        dspine_resolve_params(c);
    } catch (const std::invalid_argument & e) {
        throw failure(DSPINE_ERR_LOAD, e.what());
    }
    require(d.is_dspine, std::string(draft) + ": no DSpine drafter (convert one with dspine-convert)", DSPINE_ERR_LOAD);
}

void set_threads(common_params & c, int32_t n_threads) {
    c.cpuparams.n_threads = n_threads > 0 ? n_threads : -1;
    postprocess_cpu_params(c.cpuparams, nullptr);
    postprocess_cpu_params(c.cpuparams_batch, &c.cpuparams);
}

void set_params(dspine_pair & pair, const char * target, const char * draft, const dspine_params & p) {
    check_params(p);
    common_params & c = pair.params;
    c.model.path      = target;
    c.n_ctx           = p.n_ctx;
    c.n_batch         = p.n_batch;
    c.n_ubatch        = std::min(p.n_ubatch, p.n_batch);
    c.n_parallel      = p.n_seq;
    c.n_gpu_layers    = p.n_gpu_layers;
    c.cache_type_k    = (ggml_type) p.type_k;
    c.cache_type_v    = (ggml_type) p.type_v;
    c.flash_attn_type = (llama_flash_attn_type) p.flash_attn;
    c.fit_params      = false;
    c.warmup          = false;
    set_threads(c, p.n_threads);
    if (draft) {
        set_drafter_params(c, draft, p);
    }
}

void open_target(dspine_pair & pair, bool logits_all) {
    // the taps of every row of a batch are read, and the logits of those rows that may be sampled
    const auto limits = common_speculative_get_output_limits(pair.params.n_batch, pair.params.n_parallel, common_speculative_n_max(&pair.params.speculative));
    pair.params.n_outputs_max         = logits_all ? pair.params.n_batch : limits.total;
    pair.params.n_outputs_max_per_seq = logits_all ? pair.params.n_batch : limits.per_seq;
    first_log_error.clear();
    pair.target = common_init_from_params(pair.params);
    const std::string & path = pair.params.model.path;
    require(pair.target->model(), path + ": the target cannot be loaded" + logged_reason(), DSPINE_ERR_LOAD);
    require(pair.target->model()->arch_name() != "dflash", path + ": this is a drafter, which generates nothing alone: open its "
            "target, with this file as the drafter", DSPINE_ERR_LOAD);
    require(pair.target->context(), path + ": no context can be made for the target" + logged_reason(), DSPINE_ERR_LOAD);
    pair.params.n_batch = (int32_t) llama_n_batch(pair.ctx_tgt()); // never more than the context
    pair.n_rows_max = std::min(pair.params.n_batch, pair.params.n_outputs_max);
}

void open_drafter(dspine_pair & pair, bool capture) {
    auto & draft = pair.params.speculative.draft;
    common_params for_draft = common_base_params_to_speculative(pair.params);
    if (capture) {
        for_draft.cb_eval = capture_tensor;
        for_draft.cb_eval_user_data = &pair;
    }
    first_log_error.clear();
    dspine_take_misfit();
    pair.drafter = common_speculative_init_from_params(for_draft, const_cast<llama_model *>(pair.model_tgt()), pair.ctx_tgt());

    const std::string path = draft.mparams.path;
    const llama_model * model = pair.drafter->model();
    const std::string misfit = dspine_take_misfit();
    require(misfit.empty(), path + ": the drafter does not fit: " + misfit, DSPINE_ERR_LOAD);
    require(model, path + ": the drafter cannot be loaded" + logged_reason(), DSPINE_ERR_LOAD);
    require(pair.ctx_dft(), path + ": no context can be made for the drafter" + logged_reason(), DSPINE_ERR_LOAD);

    draft.ctx_tgt = pair.ctx_tgt();
    draft.ctx_dft = pair.ctx_dft();
    pair.speculative.reset(common_speculative_init(pair.params.speculative, (uint32_t) pair.params.n_parallel));
    require(pair.speculative != nullptr, path + ": speculative decoding cannot be set up", DSPINE_ERR_LOAD);

    const int32_t * layers = llama_model_target_layer_ids(model);
    pair.taps.assign(layers, layers + llama_model_target_layer_ids_n(model));
    pair.block_size = (int32_t) model->hparams.dflash_block_size;
    pair.top_k      = llama_model_dflash_selector_top_k(model);
    pair.batch_feed = common_batch(pair.ctx_dft());
}

// The drafter of an attached pair works beside a context that was made without it.
void set_attached_params(dspine_pair & pair, const char * draft, const dspine_params & p) {
    check_params(p);
    common_params & c = pair.params;
    c.n_ctx      = (int32_t) llama_n_ctx(pair.borrowed);
    c.n_batch    = (int32_t) llama_n_batch(pair.borrowed);
    c.n_ubatch   = (int32_t) llama_n_ubatch(pair.borrowed);
    c.n_parallel = 1;
    c.flash_attn_type = (llama_flash_attn_type) p.flash_attn;
    c.fit_params = false;
    c.warmup     = false;
    set_threads(c, p.n_threads > 0 ? p.n_threads : llama_n_threads(pair.borrowed));
    set_drafter_params(c, draft, p);
    const int32_t rows = pair.n_draft() + 1;
    require(rows <= (int32_t) llama_n_batch(pair.borrowed), "the context takes " + std::to_string(llama_n_batch(pair.borrowed)) +
            " tokens at once, a verification has " + std::to_string(rows) + " rows; raise its n_batch or lower n_draft");
    c.n_batch = (int32_t) llama_n_batch(pair.borrowed); // resolving may have raised it
    pair.n_rows_max = c.n_batch;
}

void need_rollback(llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    require(!llama_model_is_recurrent(model) && !llama_model_is_hybrid(model),
            "the target is recurrent or hybrid: its context cannot drop rejected tokens unless it is made for drafting "
            "(use dspine.Engine or llama-server)", DSPINE_ERR_LOAD);
}

} // namespace

void decode_target(dspine_pair & pair) {
    const int32_t rc = llama_process(pair.ctx_tgt(), LLAMA_PROCESS_TYPE_DECODE, pair.batch.get());
    require(rc == 0, rc == 1 ? "the context is full" : "the target could not evaluate the batch (" + std::to_string(rc) + ")", DSPINE_ERR_DECODE);
    require(common_speculative_process(pair.speculative.get(), pair.batch), "the drafter could not take the features", DSPINE_ERR_DECODE);
}

bool cut(llama_context * ctx, int32_t seq, int32_t pos) {
    return !ctx || llama_memory_seq_rm(llama_get_memory(ctx), seq, pos, -1);
}

void truncate(dspine_pair & pair, int32_t seq, int32_t pos) {
    for (llama_context * ctx : { pair.ctx_tgt(), pair.ctx_dft() }) {
        require(cut(ctx, seq, pos), "the cache cannot be cut at position " + std::to_string(pos));
    }
}

void draft_blocks(dspine_pair & pair, const std::vector<draft_request> & requests, const llama_tokens & prompt) {
    pair.drafts.assign(requests.size(), {});
    for (size_t i = 0; i < requests.size(); ++i) {
        const draft_request & r = requests[i];
        common_speculative_get_draft_params(pair.speculative.get(), r.seq) = {
            /*.drafting =*/ true, /*.n_max =*/ r.n_max, /*.pos0 =*/ r.pos, /*.id_last =*/ r.anchor,
            /*.prompt =*/ &prompt, /*.result =*/ &pair.drafts[i],
        };
    }
    common_speculative_draft(pair.speculative.get());
    for (const draft_request & r : requests) {
        llama_memory_seq_rm(llama_get_memory(pair.ctx_dft()), r.seq, r.pos, -1); // block rows never stay
    }
}

int32_t dspine_abi_version(void) { return DSPINE_ABI_VERSION; }

uint32_t dspine_params_size(void)   { return sizeof(dspine_params); }
uint32_t dspine_sampling_size(void) { return sizeof(dspine_sampling); }
uint32_t dspine_info_size(void)     { return sizeof(dspine_info); }
uint32_t dspine_stats_size(void)    { return sizeof(dspine_stats); }
uint32_t dspine_round_size(void)    { return sizeof(dspine_round); }
uint32_t dspine_device_size(void)   { return sizeof(dspine_device); }

const char * dspine_last_error(void) { return last_error.c_str(); }

static int32_t log_level = 0;

static void on_log(ggml_log_level level, const char * text, void *) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    last = level == GGML_LOG_LEVEL_CONT ? last : level; // a continuation belongs to the line before it
    if (last == GGML_LOG_LEVEL_ERROR && first_log_error.empty()) {
        first_log_error = text;
    }
    // ggml numbers its levels debug 1, info 2, warning 3, error 4; ours grow with the amount of text
    if (log_level > 0 && last >= GGML_LOG_LEVEL_ERROR - log_level + 1) {
        fputs(text, stderr);
    }
}

void dspine_set_log_level(int32_t level) {
    log_level = std::max(0, std::min(level, 4));
    const int verbosity[] = { -1, LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };
    common_log_set_verbosity_thold(verbosity[log_level]);
    llama_log_set(on_log, nullptr);
}

void init_backends() {
    static const bool once = [] { dspine_set_log_level(log_level); llama_backend_init(); return true; }();
    (void) once;
}

void dspine_params_default(dspine_params * params) {
    const common_params c{};
    *params = {};
    params->size         = sizeof(dspine_params);
    params->n_ctx        = 4096;
    params->n_batch      = c.n_batch;
    params->n_ubatch     = c.n_ubatch;
    params->n_seq        = 1;
    params->n_gpu_layers = c.n_gpu_layers;
    params->n_gpu_layers_draft = c.speculative.draft.n_gpu_layers;
    params->type_k       = GGML_TYPE_F16;
    params->type_v       = GGML_TYPE_F16;
    params->type_k_draft = GGML_TYPE_F16;
    params->type_v_draft = GGML_TYPE_F16;
    params->flash_attn   = LLAMA_FLASH_ATTN_TYPE_AUTO;
    params->logits_all   = true;
}

dspine_status dspine_open(const char * target, const char * draft, const dspine_params * params, dspine_pair ** out) {
    return guarded([&] {
        require(target && params && out, "target, params and out must not be NULL");
        *out = nullptr;
        init_backends();
        auto pair = std::make_unique<dspine_pair>();
        set_params(*pair, target, draft, *params);
        open_target(*pair, params->logits_all);
        pair->batch = common_batch(pair->ctx_tgt());
        if (draft) {
            open_drafter(*pair, params->capture);
        }
        *out = pair.release();
    });
}

dspine_status dspine_attach(void * target, const char * draft, const dspine_params * params, dspine_pair ** out) {
    return guarded([&] {
        require(target && draft && params && out, "target, draft, params and out must not be NULL");
        *out = nullptr;
        init_backends();
        auto pair = std::make_unique<dspine_pair>();
        pair->borrowed = static_cast<llama_context *>(target);
        need_rollback(pair->borrowed);
        set_attached_params(*pair, draft, *params);
        pair->batch = common_batch(pair->ctx_tgt());
        open_drafter(*pair, params->capture);
        *out = pair.release();
    });
}

void dspine_close(dspine_pair * pair) { delete pair; }

dspine_status dspine_get_info(const dspine_pair * pair, dspine_info * info) {
    return guarded([&] {
        require(pair && info, "pair and info must not be NULL");
        *info = {};
        info->n_embd  = pair->n_embd();
        info->n_vocab = pair->n_vocab();
        info->n_ctx   = (int32_t) llama_n_ctx(pair->ctx_tgt());
        if (pair->ctx_dft()) {
            info->n_layer_draft  = llama_model_n_layer(llama_get_model(pair->ctx_dft()));
            info->n_taps         = (int32_t) pair->n_taps();
            info->block_size     = pair->block_size;
            info->n_draft        = pair->n_draft();
            info->top_k          = pair->top_k;
            info->n_ubatch_draft = (int32_t) llama_n_ubatch(pair->ctx_dft());
        }
    });
}

dspine_status dspine_truncate(dspine_pair * pair, int32_t seq, int32_t pos) {
    return guarded([&] {
        require(pair, "pair must not be NULL");
        pair->need_seq(seq);
        require(pos >= 0, "position " + std::to_string(pos) + " is negative");
        pair->forget_generation(seq);
        truncate(*pair, seq, pos);
    });
}

dspine_status dspine_draft_truncate(dspine_pair * pair, int32_t seq, int32_t pos) {
    return guarded([&] {
        require(pair, "pair must not be NULL");
        pair->need_drafter();
        pair->need_seq(seq);
        require(pos >= 0, "position " + std::to_string(pos) + " is negative");
        pair->forget_generation(seq);
        require(cut(pair->ctx_dft(), seq, pos), "the cache cannot be cut at position " + std::to_string(pos));
    });
}

dspine_status dspine_target_decode(dspine_pair * pair, int32_t seq, const int32_t * tokens, int32_t n, int32_t pos0) {
    return guarded([&] {
        require(pair && tokens, "pair and tokens must not be NULL");
        pair->need_seq(seq);
        require(n >= 1 && n <= pair->n_rows_max, std::to_string(n) + " tokens, the batch takes 1 to " + std::to_string(pair->n_rows_max));
        pair->need_room(pos0, n);
        std::for_each(tokens, tokens + n, [&](int32_t id) { pair->need_token(id); });

        pair->forget_results();
        pair->forget_generation(seq);
        for (int32_t i = 0; i < n; ++i) {
            pair->batch.add(tokens[i], pos0 + i, seq, true);
        }
        try {
            decode_target(*pair);
        } catch (...) {
            pair->forget_results();
            throw;
        }
    });
}

dspine_status dspine_target_logits(dspine_pair * pair, float * out, int64_t count) {
    return guarded([&] {
        require(pair && out, "pair and out must not be NULL");
        const int64_t width = pair->n_vocab();
        require(count > 0 && count == pair->batch.size() * width, "room for " + std::to_string(count) + " logits, there are " +
                std::to_string(pair->batch.size() * width));
        for (int32_t i = 0; i < pair->batch.size(); ++i) {
            const float * row = llama_get_logits_ith(pair->ctx_tgt(), i);
            require(row, "row " + std::to_string(i) + " has no logits", DSPINE_ERR_DECODE);
            std::memcpy(out + i * width, row, width * sizeof(float));
        }
    });
}

dspine_status dspine_set_taps(dspine_pair * pair, const int32_t * layers, int32_t n) {
    return guarded([&] {
        require(pair && layers, "pair and layers must not be NULL");
        require(!pair->ctx_dft(), "the drafter's file decides which layers are tapped");
        const std::vector<int32_t> wanted(layers, layers + std::max(n, 0));
        require(!wanted.empty(), "no layer to tap");
        const std::string why = dspine_check_taps(pair->ctx_tgt(), wanted);
        require(why.empty(), why);
        for (const int32_t layer : pair->taps) {
            llama_set_embeddings_layer_inp(pair->ctx_tgt(), (uint32_t) layer, false);
        }
        for (const int32_t layer : wanted) {
            llama_set_embeddings_layer_inp(pair->ctx_tgt(), (uint32_t) layer, true);
        }
        pair->taps = wanted;
        pair->batch.clear(); // its rows were not tapped
    });
}

dspine_status dspine_target_taps(dspine_pair * pair, float * out, int64_t count) {
    return guarded([&] {
        require(pair && out, "pair and out must not be NULL");
        require(!pair->taps.empty(), "this pair has no drafter and no taps were set");
        const int64_t width = pair->n_embd();
        const int64_t rows  = pair->batch.size();
        require(rows > 0 && count == rows * pair->n_taps() * width, "room for " + std::to_string(count) + " values, there are " +
                std::to_string(rows * pair->n_taps() * width));
        for (int64_t tap = 0; tap < pair->n_taps(); ++tap) {
            const float * values = llama_get_embeddings_layer_inp(pair->ctx_tgt(), (uint32_t) pair->taps[tap]);
            for (int64_t i = 0; i < rows; ++i) {
                std::memcpy(out + (i * pair->n_taps() + tap) * width, values + i * width, width * sizeof(float));
            }
        }
    });
}

dspine_status dspine_draft_feed(dspine_pair * pair, int32_t seq, const float * features, int32_t n, int32_t pos0) {
    return guarded([&] {
        require(pair && features, "pair and features must not be NULL");
        pair->need_drafter();
        pair->need_seq(seq);
        require(n >= 1, "n must be at least 1");
        pair->need_room(pos0, n);
        pair->forget_generation(seq);
        const size_t  width    = (size_t) (pair->n_taps() * pair->n_embd());
        const int32_t n_ubatch = (int32_t) llama_n_ubatch(pair->ctx_dft());
        for (int32_t from = 0; from < n; from += n_ubatch) {
            pair->batch_feed.clear();
            for (int32_t i = from; i < std::min(n, from + n_ubatch); ++i) {
                const llama_pos p = pos0 + i;
                const llama_pos pos[4] = { p, p, p, 0 }; // as common_speculative_process does for M-RoPE drafters
                pair->batch_feed.add_embd({ const_cast<float *>(features) + i * width, 1, width }, pos, seq, false);
            }
            const int32_t rc = llama_process(pair->ctx_dft(), LLAMA_PROCESS_TYPE_DECODE, pair->batch_feed.get());
            require(rc == 0, "the drafter could not take the features (" + std::to_string(rc) + ")", DSPINE_ERR_DECODE);
        }
    });
}

dspine_status dspine_draft_many(dspine_pair * pair, const int32_t * seqs, const int32_t * anchors, const int32_t * positions,
                                int32_t n, int32_t * out, int32_t * n_out) {
    return guarded([&] {
        require(pair && seqs && anchors && positions && out && n_out, "no argument may be NULL");
        pair->need_drafter();
        std::vector<draft_request> requests;
        for (int32_t i = 0; i < n; ++i) {
            pair->need_seq(seqs[i]);
            pair->need_token(anchors[i]);
            pair->need_room(positions[i], 1);
            require(i == 0 || seqs[i] > seqs[i - 1], "sequences must be given in ascending order, each once");
            const llama_pos end = llama_memory_seq_pos_max(llama_get_memory(pair->ctx_dft()), seqs[i]) + 1;
            require(end == 0 || positions[i] == end, "position " + std::to_string(positions[i]) + " does not follow the " +
                    std::to_string(end) + " rows that sequence " + std::to_string(seqs[i]) + " was fed");
            requests.push_back({ seqs[i], anchors[i], positions[i], 0 });
        }
        require(!requests.empty(), "no sequence to draft for");
        draft_blocks(*pair, requests, {});
        for (int32_t i = 0; i < n; ++i) {
            const llama_tokens & ids = pair->drafts[i];
            std::copy(ids.begin(), ids.end(), out + (int64_t) i * pair->n_draft());
            n_out[i] = (int32_t) ids.size();
        }
    });
}

dspine_status dspine_draft(dspine_pair * pair, int32_t seq, int32_t anchor, int32_t pos, int32_t * out, int32_t * n_out) {
    return dspine_draft_many(pair, &seq, &anchor, &pos, 1, out, n_out);
}

dspine_status dspine_draft_candidates(dspine_pair * pair, int32_t index, int32_t * candidates, float * scores) {
    return guarded([&] {
        require(pair && candidates && scores, "no argument may be NULL");
        pair->need_drafter();
        require(index >= 0 && index < (int32_t) pair->drafts.size(), "block " + std::to_string(index) + " was not drafted");
        const float * lattice = llama_get_embeddings_nextn(pair->ctx_dft());
        require(lattice, "nothing was drafted");
        const int32_t k    = pair->top_k;
        const int32_t rows = pair->n_draft() + 1;
        for (int32_t t = 1; t < rows; ++t) {
            const float * row = lattice + (int64_t) (index * rows + t) * pair->n_embd();
            for (int32_t j = 0; j < k; ++j) {
                candidates[(t - 1) * k + j] = (int32_t) row[j];
            }
            std::copy(row + k, row + k + k * k, scores + (int64_t) (t - 1) * k * k);
        }
    });
}

dspine_status dspine_draft_tensor(dspine_pair * pair, const char * name, int32_t layer, float * out, int64_t count) {
    return guarded([&] {
        require(pair && name && out, "no argument may be NULL");
        pair->need_drafter();
        const std::string key = layer >= 0 ? std::string(name) + "-" + std::to_string(layer) : name;
        const auto it = pair->captured.find(key);
        require(it != pair->captured.end(), "no tensor '" + key + "' was captured (open the pair with capture, then draft)");
        require(count == (int64_t) it->second.size(), "room for " + std::to_string(count) + " values, '" + key + "' has " +
                std::to_string(it->second.size()));
        std::copy(it->second.begin(), it->second.end(), out);
    });
}
