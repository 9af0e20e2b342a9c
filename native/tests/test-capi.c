/* The header is plain C, sizes agree, and every misuse gives a status and a line of text. */
#include "dspine.h"
#include "check.h"

#include <string.h>

static void fails(dspine_status got, dspine_status expected, const char * text) {
    if (got != expected || !strstr(dspine_last_error(), text)) {
        fprintf(stderr, "expected status %d and '%s', got %d and '%s'\n", expected, text, got, dspine_last_error());
        exit(1);
    }
}

static void test_layout(void) {
    CHECK(dspine_abi_version() == DSPINE_ABI_VERSION);
    CHECK(dspine_params_size() == sizeof(dspine_params));
    CHECK(dspine_info_size() == sizeof(dspine_info));
    CHECK(dspine_stats_size() == sizeof(dspine_stats));
    CHECK(dspine_round_size() == sizeof(dspine_round));
    CHECK(dspine_sampling_size() == sizeof(dspine_sampling));
    CHECK(dspine_device_size() == sizeof(dspine_device));
}

static void test_open_refuses(void) {
    dspine_params params;
    dspine_pair * pair = (dspine_pair *) 1;

    dspine_params_default(&params);
    CHECK(params.size == sizeof(params));
    fails(dspine_open(NULL, NULL, &params, &pair), DSPINE_ERR_INVALID, "must not be NULL");
    fails(dspine_open("no-such-target.gguf", NULL, &params, &pair), DSPINE_ERR_LOAD, "no-such-target.gguf");
    CHECK(pair == NULL);
    fails(dspine_open("no-such-target.gguf", "no-such-drafter.gguf", &params, &pair), DSPINE_ERR_LOAD, "no-such-drafter.gguf");

    params.n_seq = 0;
    fails(dspine_open("t", NULL, &params, &pair), DSPINE_ERR_INVALID, "n_seq");
    dspine_params_default(&params);
    params.type_k = 9999;
    fails(dspine_open("t", NULL, &params, &pair), DSPINE_ERR_INVALID, "9999");
    params.type_k = 4; /* Q4_2, removed: no block size */
    fails(dspine_open("t", NULL, &params, &pair), DSPINE_ERR_INVALID, "no ggml_type");
    dspine_params_default(&params);
    params.flash_attn = 57;
    fails(dspine_open("t", NULL, &params, &pair), DSPINE_ERR_INVALID, "flash_attn");
    params.size = 1;
    fails(dspine_open("t", NULL, &params, &pair), DSPINE_ERR_INVALID, "this library expects");
}

static void test_machine(void) {
    dspine_device device;
    int32_t cpus = 0, i;

    CHECK(strlen(dspine_llama_build()) > 0);
    CHECK(strlen(dspine_system_info()) > 0);
    for (i = 0; i < dspine_device_count(); ++i) {
        CHECK(dspine_get_device(i, &device) == DSPINE_OK);
        CHECK(strlen(device.name) > 0);
        cpus += device.type == 0 && device.total_bytes > 0;
    }
    CHECK(cpus > 0);
    fails(dspine_get_device(-1, &device), DSPINE_ERR_INVALID, "device -1");
    fails(dspine_get_device(i, &device), DSPINE_ERR_INVALID, "outside");
}

static void test_null_handles(void) {
    int32_t id = 0, n = 0;
    float x = 0;
    char c = 0;
    bool yes = false;
    dspine_info info;
    dspine_params params;
    dspine_sampling sampling;
    dspine_stats stats;
    dspine_round round;
    dspine_pair * pair = NULL;

    dspine_close(NULL);
    fails(dspine_get_info(NULL, &info), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_truncate(NULL, 0, 0), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_target_decode(NULL, 0, &id, 1, 0), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_target_logits(NULL, &x, 1), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_set_taps(NULL, &id, 1), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_target_taps(NULL, &x, 1), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_draft_feed(NULL, 0, &x, 1, 0), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_draft(NULL, 0, 0, 0, &id, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_draft_candidates(NULL, 0, &id, &x), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_draft_tensor(NULL, "result_norm", -1, &x, 1), DSPINE_ERR_INVALID, "NULL");
    dspine_params_default(&params);
    fails(dspine_attach(NULL, "d", &params, &pair), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_draft_truncate(NULL, 0, 0), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_sampling_default(NULL, &sampling), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_begin(NULL, &id, 1, 1, 0, NULL), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_step(NULL, -1, &round), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_get_stats(NULL, &stats), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_end(NULL), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_tokenize(NULL, "", 0, true, true, &id, 1, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_token_to_piece(NULL, 0, false, &c, 1, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_detokenize(NULL, &id, 1, false, &c, 1, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_token_is_eog(NULL, 0, &yes), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_apply_template(NULL, "[]", 2, true, -1, &c, 1, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_model_meta(NULL, false, "k", &c, 1, &n), DSPINE_ERR_INVALID, "NULL");
    fails(dspine_generate(NULL, &id, 1, 1, false, &id, &n, NULL, NULL, NULL), DSPINE_ERR_INVALID, "NULL");
}

int main(void) {
    test_layout();
    test_machine();
    test_open_refuses();
    test_null_handles();
    return 0;
}
