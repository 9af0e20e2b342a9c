#include "generate.h"

#include <algorithm>
#include <cmath>

namespace {

// the server caps a slot so, too: beyond, positions were never trained
int32_t usable_context(const dspine_pair & pair) {
    return std::min<int32_t>(llama_n_ctx_seq(pair.ctx_tgt()), llama_model_n_ctx_train(pair.model_tgt()));
}

// Whether a cache that is cut at `pos` still has what the next token looks at. Recurrent layers keep no past states
// (beyond what a rejected draft needs), and a sliding window has dropped its older rows. The rule is llama-server's.
bool reaches_back(llama_context * ctx, int32_t pos, bool has_new_tokens) {
    if (!ctx) {
        return true;
    }
    const int32_t n_swa     = llama_model_n_swa(llama_get_model(ctx));
    const int32_t threshold = std::max(0, pos - n_swa - (has_new_tokens ? 0 : 1));
    const int32_t pos_min   = llama_memory_seq_pos_min(llama_get_memory(ctx), 0);
    return pos_min >= 0 && pos_min < threshold;
}

void need_fraction(float value, const char * name) {
    require(value >= 0.0f && value <= 1.0f, std::string(name) + " must lie between 0 and 1"); // false for NaN
}

common_params_sampling to_common(const dspine_pair & pair, const dspine_sampling & s) {
    require(s.size == sizeof(s), "dspine_sampling has " + std::to_string(s.size) + " bytes, this library expects " + std::to_string(sizeof(s)));
    require(std::isfinite(s.temperature) && s.temperature >= 0.0f, "temperature must be a number of at least 0");
    require(s.top_k >= 0, "top_k must be at least 0 (0: all tokens)");
    need_fraction(s.top_p, "top_p");
    need_fraction(s.min_p, "min_p");
    need_fraction(s.typical_p, "typical_p");
    require(s.penalty_last_n >= 0, "penalty_last_n must not be negative");
    require(std::isfinite(s.penalty_repeat) && s.penalty_repeat > 0.0f, "penalty_repeat must be a number above 0");
    require(std::isfinite(s.penalty_freq) && std::isfinite(s.penalty_present), "penalties must be numbers");

    common_params_sampling c = pair.params.sampling;
    c.seed            = s.seed;
    c.temp            = s.temperature;
    c.top_k           = s.top_k;
    c.top_p           = s.top_p;
    c.min_p           = s.min_p;
    c.typ_p           = s.typical_p;
    c.penalty_last_n  = s.penalty_last_n;
    c.penalty_repeat  = s.penalty_repeat;
    c.penalty_freq    = s.penalty_freq;
    c.penalty_present = s.penalty_present;
    if (s.ignore_eos) {
        c.logit_bias.insert(c.logit_bias.end(), c.logit_bias_eog.begin(), c.logit_bias_eog.end());
    }
    return c;
}

common_params_sampling greedy() {
    common_params_sampling c;
    c.temp = 0.0f;
    return c;
}

} // namespace

generation::generation(dspine_pair & pair, const llama_tokens & prompt, int32_t n_predict, uint32_t flags, common_params_sampling sampling)
    : pair(pair), prompt(prompt), n_predict(n_predict), past_eog(flags & DSPINE_PAST_EOG), n_ctx(usable_context(pair)),
      sampler(common_sampler_init(pair.model_tgt(), sampling)) {
    if (!(flags & DSPINE_REUSE_PROMPT)) {
        pair.cached.clear();
    }
    reuse_cache();
    for (const llama_token id : prompt) {
        common_sampler_accept(sampler.get(), id, false); // penalties count the prompt
    }
    pair.stats = {};
    pair.stats.prompt_tokens = (int64_t) prompt.size();
    pair.stats.prompt_reused = (int64_t) pair.cached.size();
}

void generation::reuse_cache() {
    llama_tokens & cached = pair.cached;
    size_t n = 0;
    while (n < cached.size() && n < prompt.size() && cached[n] == prompt[n]) {
        ++n;
    }
    if (n > 0) {
        const bool has_new_tokens = n < prompt.size();
        for (llama_context * ctx : { pair.ctx_tgt(), pair.ctx_dft() }) {
            if (!reaches_back(ctx, (int32_t) n, has_new_tokens)) {
                n = 0;
            }
        }
    }
    n = std::min(n, prompt.size() - 1); // the last row of the prompt gives the first token
    if (n == 0 || !cut(pair.ctx_tgt(), 0, (int32_t) n) || !cut(pair.ctx_dft(), 0, (int32_t) n)) {
        n = 0;
        cached.clear();
        truncate(pair, 0, 0);
    }
    cached.resize(n);
}

void generation::step(int32_t n_draft, dspine_round & round) {
    emitted.clear();
    drafted.clear();
    round = {};
    round.anchor_pos = round.anchor = -1;
    if (anchor == LLAMA_TOKEN_NULL) {
        prefill();
    } else {
        draft_and_verify(n_draft, round);
    }
    round.drafted   = drafted.data();
    round.n_drafted = (int32_t) drafted.size();
    round.emitted   = emitted.data();
    round.n_emitted = (int32_t) emitted.size();
    round.n_prompt  = (int32_t) std::min(pair.cached.size(), prompt.size());
    round.stop      = stop;
}

// one batch of the prompt; the answer's first token comes from the last row of the last one and is the first anchor
void generation::prefill() {
    const int64_t begin = ggml_time_us();
    llama_tokens & cached = pair.cached;
    const size_t from = cached.size();
    const size_t to   = std::min(prompt.size(), from + pair.params.n_batch);
    const bool   last = to == prompt.size();
    pair.batch.clear();
    for (size_t i = from; i < to; ++i) {
        pair.batch.add(prompt[i], (llama_pos) i, 0, i + 1 == prompt.size());
    }
    decode_target(pair);
    cached.insert(cached.end(), prompt.begin() + from, prompt.begin() + to);
    if (last) {
        if (pair.speculative) {
            common_speculative_begin(pair.speculative.get(), 0, cached);
        }
        const std::vector<int> last_row = { pair.batch.size() - 1 };
        emit(common_sampler_sample_and_accept_n(sampler.get(), pair.ctx_tgt(), last_row, llama_tokens{}));
    }
    pair.stats.prompt_us += ggml_time_us() - begin;
}

// the server leaves one position for a context shift and never drafts past what may still be emitted
int32_t generation::room_to_draft(int32_t n_draft) const {
    int64_t room = std::min<int64_t>(pair.n_draft(), n_ctx - (int64_t) pair.cached.size() - 2);
    if (n_predict >= 0) {
        room = std::min(room, n_predict - n_emitted - 1);
    }
    if (n_draft >= 0) {
        room = std::min<int64_t>(room, n_draft);
    }
    return (int32_t) std::max<int64_t>(room, 0);
}

void generation::draft_and_verify(int32_t n_draft, dspine_round & round) {
    const int32_t pos  = (int32_t) pair.cached.size();
    const int32_t room = pair.speculative ? room_to_draft(n_draft) : 0;
    round.anchor_pos = pos;
    round.anchor     = anchor;

    const int64_t t_draft = ggml_time_us();
    if (room > 0) {
        draft_blocks(pair, { { 0, anchor, pos, room } }, pair.cached);
        drafted = pair.drafts[0];
    }
    const int64_t t_verify = ggml_time_us();
    verify();
    round.n_accepted = (int32_t) ids.size() - 1;
    pair.cached.push_back(anchor);
    pair.cached.insert(pair.cached.end(), ids.begin(), ids.end() - 1);
    truncate(pair, 0, (int32_t) pair.cached.size());
    round.draft_us  = t_verify - t_draft;
    round.verify_us = ggml_time_us() - t_verify;
    count(round);
    emit(ids);
}

void generation::verify() {
    const int32_t pos = (int32_t) pair.cached.size();
    pair.batch.clear();
    pair.batch.add(anchor, pos, 0, true);
    std::vector<int> rows = { 0 };
    for (size_t i = 0; i < drafted.size(); ++i) {
        rows.push_back((int) i + 1);
        pair.batch.add(drafted[i], pos + 1 + (int32_t) i, 0, true);
    }
    decode_target(pair);
    ids = common_sampler_sample_and_accept_n(sampler.get(), pair.ctx_tgt(), rows, drafted);
    if (pair.speculative) {
        common_speculative_accept(pair.speculative.get(), 0, (uint16_t) (ids.size() - 1));
    }
}

void generation::count(const dspine_round & round) {
    dspine_stats & stats = pair.stats;
    stats.rounds    += 1;
    stats.drafted   += (int64_t) drafted.size();
    stats.accepted  += round.n_accepted;
    stats.draft_us  += round.draft_us;
    stats.verify_us += round.verify_us;
    for (size_t i = 0; i < std::min<size_t>(drafted.size(), DSPINE_MAX_POSITIONS); ++i) {
        stats.drafted_at[i]  += 1;
        stats.accepted_at[i] += (int32_t) i < round.n_accepted;
    }
}

void generation::emit(const llama_tokens & ids) {
    for (const llama_token id : ids) {
        emitted.push_back(id);
        anchor     = id;
        n_emitted += 1;
        if (!past_eog && llama_vocab_is_eog(pair.vocab(), id)) {
            stop = DSPINE_STOP_EOG;
            return;
        }
        if (n_predict >= 0 && n_emitted >= n_predict) {
            stop = DSPINE_STOP_LIMIT;
            return;
        }
    }
    if ((int32_t) pair.cached.size() + 1 >= n_ctx) {
        stop = DSPINE_STOP_CONTEXT;
    }
}

static void begin(dspine_pair & pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict, uint32_t flags,
                  const dspine_sampling * sampling) {
    require(!pair.borrowed, "this pair is attached to another program's context, which generates itself");
    require(n_prompt >= 1, "the prompt is empty");
    require(n_predict != 0, "n_predict must be at least 1, or negative for no limit");
    const int32_t n_ctx = usable_context(pair);
    require(n_prompt < n_ctx, "a prompt of " + std::to_string(n_prompt) + " tokens does not fit a context of " +
            std::to_string(n_ctx) + ": shorten it, or open with a larger n_ctx");
    require(pair.params.n_batch > pair.n_draft() || !pair.speculative, "n_batch " + std::to_string(pair.params.n_batch) +
            " cannot hold the " + std::to_string(pair.n_draft() + 1) + " rows of a verification");
    std::for_each(prompt, prompt + n_prompt, [&](int32_t id) { pair.need_token(id); });
    const common_params_sampling chain = sampling ? to_common(pair, *sampling) : greedy();

    pair.forget_results();
    pair.running.reset();
    pair.running = std::make_unique<generation>(pair, llama_tokens(prompt, prompt + n_prompt), n_predict, flags, chain);
}

static void step(dspine_pair & pair, int32_t n_draft, dspine_round & round) {
    require(pair.running && !pair.running->done(), "no generation is in progress");
    try {
        pair.running->step(n_draft, round);
    } catch (...) {
        pair.forget_generation(0);
        throw;
    }
}

dspine_status dspine_sampling_default(const dspine_pair * pair, dspine_sampling * sampling) {
    return guarded([&] {
        require(pair && sampling, "pair and sampling must not be NULL");
        const common_params_sampling & c = pair->params.sampling;
        *sampling = {};
        sampling->size            = sizeof(*sampling);
        sampling->seed            = c.seed;
        sampling->temperature     = c.temp;
        sampling->top_k           = c.top_k;
        sampling->top_p           = c.top_p;
        sampling->min_p           = c.min_p;
        sampling->typical_p       = c.typ_p;
        sampling->penalty_last_n  = c.penalty_last_n;
        sampling->penalty_repeat  = c.penalty_repeat;
        sampling->penalty_freq    = c.penalty_freq;
        sampling->penalty_present = c.penalty_present;
        sampling->ignore_eos      = c.ignore_eos;
    });
}

dspine_status dspine_begin(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict, uint32_t flags,
                           const dspine_sampling * sampling) {
    return guarded([&] {
        require(pair && prompt, "pair and prompt must not be NULL");
        begin(*pair, prompt, n_prompt, n_predict, flags, sampling);
    });
}

dspine_status dspine_step(dspine_pair * pair, int32_t n_draft, dspine_round * round) {
    return guarded([&] {
        require(pair && round, "pair and round must not be NULL");
        step(*pair, n_draft, *round);
    });
}

dspine_status dspine_get_stats(const dspine_pair * pair, dspine_stats * stats) {
    return guarded([&] {
        require(pair && stats, "pair and stats must not be NULL");
        *stats = pair->stats;
    });
}

dspine_status dspine_end(dspine_pair * pair) {
    return guarded([&] {
        require(pair, "pair must not be NULL");
        pair->running.reset();
        pair->forget_results();
    });
}

dspine_status dspine_generate(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict, bool ignore_eog,
                              int32_t * out, int32_t * n_out, dspine_stats * stats, dspine_round_fn on_round, void * user) {
    return guarded([&] {
        require(pair && prompt && out && n_out, "pair, prompt, out and n_out must not be NULL");
        *n_out = 0;
        require(n_predict >= 1, "n_predict must be at least 1");
        begin(*pair, prompt, n_prompt, n_predict, ignore_eog ? DSPINE_PAST_EOG : 0, nullptr);
        dspine_round round;
        bool go_on = true;
        while (go_on) {
            step(*pair, -1, round);
            std::copy(round.emitted, round.emitted + round.n_emitted, out + *n_out);
            *n_out += round.n_emitted;
            go_on = round.stop == DSPINE_GO_ON;
            if (on_round && round.anchor_pos >= 0) {
                go_on = on_round(user, &round) && go_on;
            }
        }
        pair->running.reset();
        pair->forget_results();
        if (stats) {
            *stats = pair->stats;
        }
    });
}
