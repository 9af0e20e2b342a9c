// A generation in progress on sequence 0 of a pair; mirrors the steps of llama-server's slots.
#pragma once

#include "pair.h"

class generation {
public:
    // cuts the caches to what they share with the prompt; evaluates nothing
    generation(dspine_pair & pair, const llama_tokens & prompt, int32_t n_predict, uint32_t flags, common_params_sampling sampling);

    // the next part of the prompt, or a round; not once it is done
    void step(int32_t n_draft, dspine_round & round);

    bool done() const { return stop != DSPINE_GO_ON; }

private:
    void    reuse_cache();
    void    prefill();
    void    draft_and_verify(int32_t n_draft, dspine_round & round);
    int32_t room_to_draft(int32_t n_draft) const;
    void    verify();
    void    count(const dspine_round & round);
    void    emit(const llama_tokens & ids);

    dspine_pair & pair;
    llama_tokens  prompt;
    const int32_t n_predict; // negative: no limit
    const bool    past_eog;
    const int32_t n_ctx;
    common_sampler_ptr sampler;

    llama_token  anchor = LLAMA_TOKEN_NULL;
    llama_tokens drafted; // of the last round
    llama_tokens ids;     // what verifying it gave
    llama_tokens emitted; // what of them belongs to the answer
    int64_t      n_emitted = 0; // all of this generation
    int32_t      stop      = DSPINE_GO_ON;
};
