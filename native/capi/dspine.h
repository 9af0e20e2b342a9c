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
#define DSPINE_ABI_VERSION 2

/* Positions of a draft that dspine_stats counts one by one. */
#define DSPINE_MAX_POSITIONS 64

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
    bool     logits_all;       /* make room for the logits of every row of dspine_target_decode; without it, that
                                  call takes as many rows as one verification, and generating needs less memory */
} dspine_params;

/* llama.cpp's sampler chain; the values of dspine_sampling_default are those that llama-server would use. */
typedef struct dspine_sampling {
    uint32_t size;            /* sizeof(dspine_sampling), set by dspine_sampling_default */
    uint32_t seed;            /* 4294967295: another one for each generation */
    float    temperature;     /* 0: greedy */
    int32_t  top_k;           /* 0: all */
    float    top_p;           /* 1: off */
    float    min_p;           /* 0: off */
    float    typical_p;       /* 1: off */
    int32_t  penalty_last_n;  /* tokens that the penalties look at */
    float    penalty_repeat;  /* 1: off */
    float    penalty_freq;    /* 0: off */
    float    penalty_present; /* 0: off */
    bool     ignore_eos;      /* never sample an end-of-generation token */
} dspine_sampling;

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

/* Of one generation, up to now. Position 0 is the first drafted token of a round. */
typedef struct dspine_stats {
    int64_t prompt_tokens;
    int64_t prompt_reused; /* of these, found in the cache */
    int64_t rounds;
    int64_t drafted;
    int64_t accepted;
    int64_t prompt_us;
    int64_t draft_us;
    int64_t verify_us;
    int64_t drafted_at[DSPINE_MAX_POSITIONS];  /* rounds that drafted this position */
    int64_t accepted_at[DSPINE_MAX_POSITIONS]; /* rounds that accepted it */
} dspine_stats;

/* Why a generation ended. */
enum {
    DSPINE_GO_ON        = 0,
    DSPINE_STOP_EOG     = 1, /* an end-of-generation token was emitted */
    DSPINE_STOP_LIMIT   = 2, /* n_predict */
    DSPINE_STOP_CONTEXT = 3  /* the context is full */
};

/* One step of a generation: a part of the prompt (anchor_pos is -1 and nothing was drafted; the last part emits the
 * first token), or one draft and its verification. Pointers are valid until the next call for the pair. */
typedef struct dspine_round {
    int32_t         anchor_pos;
    int32_t         anchor;
    const int32_t * drafted;
    int32_t         n_drafted;
    int32_t         n_accepted;
    const int32_t * emitted;  /* accepted drafts, then the target's own token; cut where the generation ends */
    int32_t         n_emitted;
    int32_t         n_prompt; /* tokens of the prompt that are in the cache */
    int32_t         stop;     /* DSPINE_GO_ON, or why this was the last step */
    int64_t         draft_us;
    int64_t         verify_us;
} dspine_round;

/* A device that llama.cpp can compute on. Texts live as long as the process. */
typedef struct dspine_device {
    const char * name;
    const char * description;
    const char * backend;
    int64_t      total_bytes;
    int64_t      free_bytes;
    int32_t      type; /* enum ggml_backend_dev_type: 0 CPU, 1 GPU, 2 integrated GPU, 3 accelerator */
} dspine_device;

/* Return false to stop after this round. */
typedef bool (*dspine_round_fn)(void * user, const dspine_round * round);

DSPINE_API int32_t      dspine_abi_version(void);
DSPINE_API uint32_t     dspine_params_size(void);
DSPINE_API uint32_t     dspine_sampling_size(void);
DSPINE_API uint32_t     dspine_info_size(void);
DSPINE_API uint32_t     dspine_stats_size(void);
DSPINE_API uint32_t     dspine_round_size(void);
DSPINE_API uint32_t     dspine_device_size(void);
DSPINE_API const char * dspine_last_error(void);

/* llama.cpp's log: 0 silent (the default), 1 errors, 2 warnings, 3 information, 4 everything. To stderr. */
DSPINE_API void dspine_set_log_level(int32_t level);

/* The llama.cpp that was built in, and what it can use of this machine. Texts live as long as the process. */
DSPINE_API const char *  dspine_llama_build(void);
DSPINE_API const char *  dspine_system_info(void);
DSPINE_API int32_t       dspine_device_count(void);
DSPINE_API dspine_status dspine_get_device(int32_t index, dspine_device * device);

DSPINE_API void dspine_params_default(dspine_params * params);

/* draft may be NULL: then nothing is drafted, and the functions of the drafter return DSPINE_ERR_INVALID. */
DSPINE_API dspine_status dspine_open(const char * target, const char * draft, const dspine_params * params, dspine_pair ** out);

/* The same around a context that the caller owns: `target` is a struct llama_context of the llama.cpp that this library
 * is linked to. The caller closes the pair before the context, and evaluates tokens of sequence 0 with
 * dspine_target_decode alone. Of `params` only what concerns the drafter is read. */
DSPINE_API dspine_status dspine_attach(void * target, const char * draft, const dspine_params * params, dspine_pair ** out);

DSPINE_API void          dspine_close(dspine_pair * pair); /* NULL is fine */
DSPINE_API dspine_status dspine_get_info(const dspine_pair * pair, dspine_info * info);

/* Forgets everything of sequence `seq` at and after position `pos`, in target and drafter. */
DSPINE_API dspine_status dspine_truncate(dspine_pair * pair, int32_t seq, int32_t pos);

/* The same in the drafter alone. */
DSPINE_API dspine_status dspine_draft_truncate(dspine_pair * pair, int32_t seq, int32_t pos);

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
 * there is a drafter. Stops at an end-of-generation token (kept) unless ignore_eog, and where the context is full. `out`
 * has room for n_predict ids, or for n_ctx if that is less. stats and on_round may be NULL; on_round sees no part of the
 * prompt. */
DSPINE_API dspine_status dspine_generate(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict,
                                         bool ignore_eog, int32_t * out, int32_t * n_out, dspine_stats * stats,
                                         dspine_round_fn on_round, void * user);

/* Generation on sequence 0, step by step; one a pair at a time. A call that writes to a cache of sequence 0 ends it. */

enum {
    DSPINE_REUSE_PROMPT = 1, /* keep what the cache shares with the prompt, where the caches can be cut there */
    DSPINE_PAST_EOG     = 2  /* go on after an end-of-generation token */
};

/* The defaults for this target: llama.cpp's, or those that its file recommends. */
DSPINE_API dspine_status dspine_sampling_default(const dspine_pair * pair, dspine_sampling * sampling);

/* Replaces the generation in progress, if any. Nothing is evaluated yet. n_predict < 0: until the context is full.
 * sampling may be NULL: greedy. */
DSPINE_API dspine_status dspine_begin(dspine_pair * pair, const int32_t * prompt, int32_t n_prompt, int32_t n_predict,
                                      uint32_t flags, const dspine_sampling * sampling);

/* Evaluates the next part of the prompt (at most n_batch tokens), or one round that drafts at most n_draft tokens
 * (negative: the depth of the pair; 0: none). After an error the generation is over and the caches are empty. */
DSPINE_API dspine_status dspine_step(dspine_pair * pair, int32_t n_draft, dspine_round * round);

/* Counts of the generation in progress, or of the last one. */
DSPINE_API dspine_status dspine_get_stats(const dspine_pair * pair, dspine_stats * stats);

/* Ends the generation, after any step; the caches stay for the next prompt. */
DSPINE_API dspine_status dspine_end(dspine_pair * pair);

/* Text. Where a function fills a buffer, `n_out` receives the number of elements that there are; call with `out` NULL to
 * ask for it. Too small a buffer is DSPINE_ERR_INVALID. Texts are UTF-8 of a given length, and not terminated. */

DSPINE_API dspine_status dspine_tokenize(const dspine_pair * pair, const char * text, int32_t n_text, bool add_special,
                                         bool parse_special, int32_t * out, int32_t capacity, int32_t * n_out);

/* `special` writes control tokens out; else they have no text. A piece may be a part of a character. */
DSPINE_API dspine_status dspine_token_to_piece(const dspine_pair * pair, int32_t token, bool special, char * out,
                                               int32_t capacity, int32_t * n_out);
DSPINE_API dspine_status dspine_detokenize(const dspine_pair * pair, const int32_t * tokens, int32_t n, bool special,
                                           char * out, int32_t capacity, int32_t * n_out);
DSPINE_API dspine_status dspine_token_is_eog(const dspine_pair * pair, int32_t token, bool * out);

/* The target's own chat template for `messages`, a JSON array as in OpenAI's chat API. The answer is a JSON object:
 * prompt, stops (texts that end the answer as well), preserved (control tokens that belong to the answer).
 * thinking: 1 on, 0 off, -1 as llama-server does by default: on where the template is known to switch it. */
DSPINE_API dspine_status dspine_apply_template(dspine_pair * pair, const char * messages, int32_t n_messages,
                                               bool add_generation_prompt, int32_t thinking, char * out,
                                               int32_t capacity, int32_t * n_out);

/* A metadata value of the target's or the drafter's file as text, for instance of "general.architecture". */
DSPINE_API dspine_status dspine_model_meta(const dspine_pair * pair, bool of_drafter, const char * key, char * out,
                                           int32_t capacity, int32_t * n_out);

#ifdef __cplusplus
}
#endif

#endif
