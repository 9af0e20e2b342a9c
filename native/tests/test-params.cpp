// How the command line's parameters follow from the drafter's file.
#include "dspine-common.h"
#include "dspine-pair.h"

#include "check.h"
#include "common.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "speculative.h"

#include <cstring>
#include <stdexcept>
#include <string>

static std::string write_header(const std::string & dir, const char * name, bool dspine, uint32_t block_size) {
    gguf_context_ptr gguf { gguf_init_empty() };
    gguf_set_val_str(gguf.get(), "general.architecture", "dflash");
    gguf_set_val_u32(gguf.get(), "dflash.block_size", block_size);
    if (dspine) {
        gguf_set_val_u32(gguf.get(), "dflash.transfer_rank", 8);
    }
    const std::string path = dir + "/" + name;
    CHECK(gguf_write_to_file(gguf.get(), path.c_str(), true));
    return path;
}

static common_params params_for(const std::string & draft) {
    common_params params;
    params.speculative.draft.mparams.path = draft;
    return params;
}

static void test_defaults(const std::string & path) {
    common_params params = params_for(path);
    params.n_parallel = 4;
    params.speculative.draft.np_auto = true;
    dspine_resolve_params(params);

    CHECK(params.speculative.types == std::vector<common_speculative_type>{ COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH });
    CHECK(params.speculative.draft.n_max == 15);
    CHECK(params.n_parallel == 1);
    CHECK(params.kv_overrides.size() == 2);
    CHECK(std::strcmp(params.kv_overrides[0].key, DSPINE_KEEP_HEAD_ROWS) == 0);
    CHECK(params.kv_overrides[1].key[0] == 0);

    dspine_resolve_params(params); // a second call, as a reload does, changes nothing
    CHECK(params.kv_overrides.size() == 2);
}

static void test_given_values(const std::string & path) {
    common_params params = params_for(path);
    params.n_parallel = 3;
    params.speculative.draft.n_max = 64;
    params.speculative.draft.n_min = 40;
    params.speculative.draft.n_max_given = true;
    dspine_resolve_params(params);
    CHECK(params.speculative.draft.n_max == 15);
    CHECK(params.speculative.draft.n_min == 15);
    CHECK(params.n_parallel == 3);

    params = params_for(path);
    params.speculative.draft.n_max = 0;
    params.speculative.draft.n_max_given = true;
    dspine_resolve_params(params);
    CHECK(!params.speculative.has_dft());
}

static void test_types(const std::string & path) {
    auto refused = [&](std::vector<common_speculative_type> types, const char * text) {
        common_params params = params_for(path);
        params.speculative.types = types;
        try {
            dspine_resolve_params(params);
        } catch (const std::invalid_argument & e) {
            return std::strstr(e.what(), text) != nullptr;
        }
        return false;
    };
    CHECK(refused({ COMMON_SPECULATIVE_TYPE_DRAFT_DSPARK }, "draft-dspark"));
    CHECK(!refused({ COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH }, ""));

    // a type that needs no model works beside the drafter
    common_params params = params_for(path);
    params.speculative.types = { COMMON_SPECULATIVE_TYPE_NONE, COMMON_SPECULATIVE_TYPE_NGRAM_MOD };
    dspine_resolve_params(params);
    CHECK((params.speculative.types == std::vector<common_speculative_type>{
            COMMON_SPECULATIVE_TYPE_NGRAM_MOD, COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH }));
}

static void test_draft_batch(const std::string & path) {
    auto ubatch = [&](int32_t n_parallel, int32_t given, int32_t n_batch) {
        common_params params = params_for(path);
        params.n_parallel = n_parallel;
        params.n_batch = n_batch;
        params.n_ubatch = std::min(n_batch, 512);
        params.speculative.draft.n_ubatch = given;
        dspine_resolve_params(params);
        const common_params draft = common_base_params_to_speculative(params);
        CHECK(draft.n_batch >= draft.n_ubatch);
        return draft.n_ubatch;
    };
    CHECK(ubatch(1, 0, 2048) == 128);
    CHECK(ubatch(1, 0, 8) == 128);
    CHECK(ubatch(9, 0, 2048) == 144); // 9 slots x 16 rows
    CHECK(ubatch(2, 8, 2048) == 32);
    CHECK(ubatch(1, 64, 2048) == 64);
}

// -b and -ub hold the verification rows: all slots in a batch, one slot in a ubatch
static void test_room_to_verify(const std::string & path) {
    common_params params = params_for(path);
    params.n_parallel = 8;
    params.n_batch    = 16;
    params.n_ubatch   = 9;
    dspine_resolve_params(params);
    CHECK(params.n_batch == 8 * 16);
    CHECK(params.n_ubatch == 17);
}

static void test_auto_slots(const std::string & dspine, const std::string & other) {
    common_params params = params_for(dspine);
    params.n_parallel = 4;
    dspine_auto_slots(params);
    CHECK(params.n_parallel == 1);

    params = params_for(other);
    params.n_parallel = 4;
    dspine_auto_slots(params);
    dspine_resolve_params(params);
    CHECK(params.n_parallel == 4);
}

// another dflash drafter keeps upstream's behaviour
static void test_others(const std::string & path) {
    common_params params = params_for(path);
    params.speculative.draft.np_auto = true;
    params.n_parallel = 4;
    dspine_resolve_params(params);
    CHECK(params.speculative.types == std::vector<common_speculative_type>{ COMMON_SPECULATIVE_TYPE_NONE });
    CHECK(params.speculative.draft.n_max == 3);
    CHECK(params.n_parallel == 4);
    CHECK(params.kv_overrides.empty());

    params.speculative.types = { COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH };
    CHECK(common_base_params_to_speculative(params).n_ubatch == params.n_ubatch);
}

int main(int argc, char ** argv) {
    const std::string dir = argc > 1 ? argv[1] : ".";
    const std::string dspine = write_header(dir, "dspine.gguf", true, 16);
    test_defaults(dspine);
    test_given_values(dspine);
    test_types(dspine);
    test_draft_batch(dspine);
    test_room_to_verify(dspine);
    const std::string other = write_header(dir, "dflash2.gguf", false, 16);
    test_auto_slots(dspine, other);
    test_others(other);
    return 0;
}
