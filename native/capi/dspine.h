/*
 * C interface of dspine: a target and its DSpine drafter, driven by the loop that llama-server runs.
 *
 * Rules: handles are opaque; integers have a fixed width; every function that can fail returns a status, and
 * dspine_last_error() then holds one line for the calling thread. No exception crosses this
 * border. A handle belongs to one thread at a time. Sizes of arrays are counted in elements.
 *
 * Token positions: `pos0` is the position of the first token or row of a call. A sequence is
 * numbered from 0 to n_seq - 1.
 */
#ifndef DSPINE_H
#define DSPINE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(_WIN32)
#    ifdef DSPINE_BUILD
#        define DSPINE_API __declspec(dllexport)
#    else
#        define DSPINE_API __declspec(dllimport)
#    endif
#else
#    define DSPINE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a declaration below changes meaning or layout. */
#define DSPINE_ABI_VERSION 1

typedef int32_t dspine_status;

enum {
    DSPINE_OK          = 0,
    DSPINE_ERR_INVALID = 1, /* an argument is out of range, or the call does not fit the state */
    DSPINE_ERR_LOAD    = 2, /* a file cannot be loaded, or the drafter does not fit the target */
    DSPINE_ERR_DECODE  = 3, /* llama.cpp could not evaluate a batch */
    DSPINE_ERR_BUG     = 4  /* an unexpected exception */
};

typedef struct dspine_pair dspine_pair;

/* Zero or negative means "the default" where it says so. Types are ggml_type values. */
typedef struct dspine_params {
    uint32_t size;             /* sizeof(dspine_params), set by dspine_params_default */
    int32_t  n_ctx;            /* tokens over all sequences; 0: as the target was trained */
    int32_t  n_batch;          /* tokens in one call of dspine_target_decode */
    int32_t  n_ubatch;
    int32_t  n_seq;
    int32_t  n_draft;          /* depth; 0: block size - 1 */
    int32_t  n_draft_ubatch;   /* 0: 128, or what the sequences need */
    int32_t  n_threads;        /* 0: llama.cpp's choice */
    int32_t  n_gpu_layers;     /* -1: llama.cpp's choice */
    int32_t  n_gpu_layers_draft;
    int32_t  type_k;           /* cache types of the target */
    int32_t  type_v;
    int32_t  type_k_draft;     /* cache types of the drafter */
    int32_t  type_v_draft;
    int32_t  flash_attn;       /* -1: auto, 0: off, 1: on */
    float    p_min;            /* stop a draft below this confidence; 0: never */
    bool     capture;          /* keep the drafter's hidden rows for dspine_draft_tensor (slow) */
} dspine_params;

typedef struct dspine_info {
    int32_t n_embd;
    int32_t n_vocab;
    int32_t n_layer_draft;
    int32_t n_taps;      /* layer outputs of the target that the drafter reads */
    int32_t block_size;  /* rows of a block as trained, the anchor included */
    int32_t n_draft;     /* depth in use */
    int32_t top_k;       /* candidates a position */
    int32_t n_ctx;
    int32_t n_ubatch_draft;
} dspine_info;

typedef struct dspine_stats {
    int64_t rounds;
    int64_t drafted;
    int64_t accepted;
    int64_t prompt_us;
    int64_t draft_us;
    int64_t verify_us;
} dspine_stats;

/* One draft and its verification. Pointers are valid during the callback. */
typedef struct dspine_round {
    int32_t         anchor_pos;
    int32_t         anchor;
    const int32_t * drafted;
    int32_t         n_drafted;
    int32_t         n_accepted;
    const int32_t * emitted; /* accepted drafts, then the target's own token */
    int32_t         n_emitted;
} dspine_round;

/* Return false to stop after this round. */
typedef bool (*dspine_round_fn)(void * user, const dspine_round * round);

DSPINE_API int32_t      dspine_abi_version(void);
DSPINE_API uint32_t     dspine_params_size(void);
DSPINE_API uint32_t     dspine_info_size(void);
DSPINE_API uint32_t     dspine_stats_size(void);
DSPINE_API uint32_t     dspine_round_size(void);
DSPINE_API const char * dspine_last_error(void);

/* llama.cpp's log: 0 silent (the default), 1 errors, 2 warnings, 3 information, 4 everything. To stderr. */
DSPINE_API void dspine_set_log_level(int32_t level);

DSPINE_API void dspine_params_default(dspine_params * params);

/* draft may be NULL: then nothing is drafted, and the functions of the drafter return DSPINE_ERR_INVALID. */
DSPINE_API dspine_status dspine_open(const char * target, const char * draft, const dspine_params * params, dspine_pair ** out);
DSPINE_API void          dspine_close(dspine_pair * pair); /* NULL is fine */
DSPINE_API dspine_status dspine_get_info(const dspine_pair * pair, dspine_info * info);

/* Forgets everything of sequence `seq` at and after position `pos`, in target and drafter. */
DSPINE_API dspine_status dspine_truncate(dspine_pair * pair, int32_t seq, int32_t pos);

/* Evaluates n <= n_batch tokens on the target and hands their tapped rows to the drafter. */
DSPINE_API dspine_status dspine_target_decode(dspine_pair * pair, int32_t seq, const int32_t * tokens, int32_t n, int32_t pos0);

/* Without a drafter: publishes the inputs of these target layers (1 to the number of layers; layer l + 1
 * reads the output of layer l) as tapped rows, in this order. With one, its file says which. */
DSPINE_API dspine_status dspine_set_taps(dspine_pair * pair, const int32_t * layers, int32_t n);

/* Of the last dspine_target_decode: logits [n, n_vocab]; tapped rows [n, n_taps * n_embd], in the order of
 * the drafter's target layers or of dspine_set_taps. `count` must equal the array's size. */
DSPINE_API dspine_status dspine_target_logits(dspine_pair * pair, float * out, int64_t count);
DSPINE_API dspine_status dspine_target_taps(dspine_pair * pair, float * out, int64_t count);

/* Puts given features [n, n_taps * n_embd] into the drafter's cache, without the target. */
DSPINE_API dspine_status dspine_draft_feed(dspine_pair * pair, int32_t seq, const float * features, int32_t n, int32_t pos0);

/* Drafts once after the anchor token at position `pos`; all before it must have been fed. Writes at most
 * n_draft ids to `out` and their number to `n_out`. The drafter's cache is as before. */
DSPINE_API dspine_status dspine_draft(dspine_pair * pair, int32_t seq, int32_t anchor, int32_t pos, int32_t * out, int32_t * n_out);

/* The same for `n` sequences in one batch: row i of `out` is n_draft wide. */
DSPINE_API dspine_status dspine_draft_many(dspine_pair * pair, const int32_t * seqs, const int32_t * anchors,
                                           const int32_t * positions, int32_t n, int32_t * out, int32_t * n_out);

/* Of block `index` of the last draft: candidates [n_draft, top_k], in no order; scores [n_draft, top_k, top_k]:
 * position, candidate before it, candidate. */
DSPINE_API dspine_status dspine_draft_candidates(dspine_pair * pair, int32_t index, int32_t * candidates, float * scores);

/* A tensor of the last draft, when `capture` was set: "dspine_pre_injection" and "dspine_post_injection" of a
 * layer [rows, n_embd], "result_norm" [rows, n_embd] and "result_output" [rows, n_vocab] with layer -1.
 * rows = blocks * (n_draft + 1). */
DSPINE_API dspine_status dspine_draft_tensor(dspine_pair * pair, const char * name, int32_t layer, float * out, int64_t count);

/* Greedy generation of at most n_predict ids after a prompt of n_prompt >= 1 ids on a cleared sequence 0, drafting when
 * there is a drafter. Stops at an end-of-generation token (kept) unless ignore_eog, and where the context is full. stats and
 * on_round may be NULL. */
DSPINE_API dspine_status dspine_generate(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict,
                                         bool ignore_eog, int32_t * out, int32_t * n_out, dspine_stats * stats,
                                         dspine_round_fn on_round, void * user);

#ifdef __cplusplus
}
#endif

#endif
