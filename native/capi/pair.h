// What the parts of libdspine share: the pair behind the handle, and the border that stops exceptions.
#pragma once

#include "dspine.h"

#include "common.h"
#include "sampling.h"
#include "speculative.h"

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct failure : std::runtime_error {
    failure(dspine_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    dspine_status status;
};

inline void require(bool ok, const std::string & what, dspine_status status = DSPINE_ERR_INVALID) {
    if (!ok) {
        throw failure(status, what);
    }
}

void set_last_error(const std::string & text);

// what every exported function runs in: exceptions end here
template <typename Body>
dspine_status guarded(const Body & body) {
    try {
        set_last_error("");
        body();
        return DSPINE_OK;
    } catch (const failure & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const std::exception & e) {
        set_last_error(std::string("unexpected: ") + e.what());
        return DSPINE_ERR_BUG;
    } catch (...) {
        set_last_error("unexpected: an exception of unknown type");
        return DSPINE_ERR_BUG;
    }
}

// hands a result out as the header promises: its size always, its elements where there is room
template <typename Source, typename T>
void fill(const Source & source, T * out, int32_t capacity, int32_t * n_out) {
    *n_out = (int32_t) source.size();
    if (out) {
        require(capacity >= *n_out, "room for " + std::to_string(capacity) + " elements, there are " + std::to_string(*n_out));
        std::copy(source.begin(), source.end(), out);
    }
}

// llama.cpp's backends and our log, once a process
void init_backends();

class generation;
struct common_chat_templates;

struct dspine_pair {
    dspine_pair();
    ~dspine_pair();

    common_params params;

    // released bottom-up: the draft context before the target's, contexts before models
    common_init_result_ptr             target;
    llama_context *                    borrowed = nullptr; // the caller's, of an attached pair
    common_speculative_init_result_ptr drafter;
    common_speculative_ptr             speculative;
    std::shared_ptr<common_chat_templates> templates; // made when first used
    bool                               can_think = false; // of the templates

    common_batch batch;        // of the last dspine_target_decode
    common_batch batch_feed;
    std::vector<llama_tokens> drafts; // of the last draft, per block
    std::map<std::string, std::vector<float>> captured;
    std::vector<int32_t> taps; // layers of the target whose inputs are read
    int32_t block_size = 0;
    int32_t top_k      = 0;
    int32_t n_rows_max = 0;    // rows of one dspine_target_decode, each with logits

    llama_tokens                cached; // what generations left in the caches of sequence 0
    std::unique_ptr<generation> running;
    dspine_stats                stats = {}; // of `running`, or of the last one

    llama_context *     ctx_tgt()   const { return borrowed ? borrowed : target->context(); }
    llama_context *     ctx_dft()   const { return drafter ? drafter->context() : nullptr; }
    const llama_model * model_tgt() const { return llama_get_model(ctx_tgt()); }
    const llama_vocab * vocab()     const { return llama_model_get_vocab(model_tgt()); }

    int32_t n_embd()  const { return llama_model_n_embd(model_tgt()); }
    int32_t n_vocab() const { return llama_vocab_n_tokens(vocab()); }
    int32_t n_draft() const { return params.speculative.draft.n_max; }
    int64_t n_taps()  const { return (int64_t) taps.size(); }

    // results of the last decode and draft, whose buffers the next call overwrites
    void forget_results();
    // the caches of a sequence are written past the generation's back
    void forget_generation(int32_t seq);

    void need_room(int32_t pos0, int32_t n) const;
    void need_drafter() const { require(ctx_dft(), "this pair was opened without a drafter"); }
    void need_seq(int32_t seq) const;
    void need_token(int32_t id) const;
};

// evaluates pair.batch on the target and feeds the drafter
void decode_target(dspine_pair & pair);

// forgets a sequence from `pos` on; false where a cache cannot be cut there
bool cut(llama_context * ctx, int32_t seq, int32_t pos);
void truncate(dspine_pair & pair, int32_t seq, int32_t pos);

struct draft_request {
    int32_t seq;
    int32_t anchor;
    int32_t pos;
    int32_t n_max; // 0: the depth in use
};

// one call of the loop's own draft step for the given sequences; fills pair.drafts
void draft_blocks(dspine_pair & pair, const std::vector<draft_request> & requests, const llama_tokens & prompt);
