// The fused operations against the same formulas composed of stock ones, on every device of every backend, in the
// style of upstream's test-backend-ops. The composed graph always runs on the CPU.
//
//   test-ops                       the built-in cases and 40 random ones
//   test-ops --random N SEED       N random cases
//   test-ops --case KEY=VALUE ...  one case; keys and defaults: struct shape
//   test-ops --types               the names of the head's types
//
// Exit code 0 where everything is equal, 1 where something differs, 2 for wrong arguments. Devices that do not
// support a case are named; the CPU has to support all of them.
#include "dspine-ops.h"

#include "check.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

struct shape {
    int64_t hidden  = 256;
    int64_t rank    = 24;
    int64_t message = 12;
    int64_t top_k   = 4;
    int64_t rows    = 8; // of a block, the anchor included
    int64_t scored  = 8;
    int64_t blocks  = 1;
    int64_t vocab   = 96;
    int64_t strided = 0; // messages of tokens are halves of wider rows, as those of a folded table
    int64_t seed    = 1;
    ggml_type head   = GGML_TYPE_F32;
    ggml_type bridge = GGML_TYPE_F32;

    int64_t tokens() const { return rows * blocks; }
    int64_t pairs()  const { return std::max<int64_t>(scored - 2, 0) * top_k * blocks; }

    std::string text() const {
        char line[256];
        snprintf(line, sizeof(line), "hidden=%" PRId64 " rank=%" PRId64 " message=%" PRId64 " top_k=%" PRId64 " rows=%" PRId64
                " scored=%" PRId64 " blocks=%" PRId64 " vocab=%" PRId64 " strided=%" PRId64 " seed=%" PRId64 " head=%s bridge=%s",
                hidden, rank, message, top_k, rows, scored, blocks, vocab, strided, seed,
                ggml_type_name(head), ggml_type_name(bridge));
        return line;
    }
};

constexpr float EPS = 0.05f; // large enough to show when it is left out

// Largest difference relative to the largest value. The two sum in another order, nothing else.
constexpr double CPU_TOLERANCE = 1e-5;
// Normalized mean squared error of another device, which may round activations and products otherwise: upstream's
// bound for a matrix product.
constexpr double DEVICE_NMSE = 5e-4;

struct inputs {
    ggml_tensor * h, * a, * w_message, * w_receiver, * w_pred, * bias;
    ggml_tensor * anchor_value, * anchor_gate, * sent_value, * sent_gate;
    ggml_tensor * head, * norm, * write, * candidates, * logits;
};

// Leaves of a case on one backend, filled with the same values for the same seed.
class case_inputs {
public:
    inputs of;

    case_inputs(const shape & s, ggml_backend_t backend) : random((uint32_t) s.seed) {
        ctx.reset(ggml_init({ ggml_tensor_overhead() * 32, nullptr, true }));
        of.h          = leaf(GGML_TYPE_F32, s.hidden, s.tokens(), 1.0f);
        of.a          = leaf(GGML_TYPE_F32, s.rank, s.tokens(), 0.3f);
        of.w_message  = leaf(s.bridge, s.rank, s.message, scale(s.rank));
        of.w_receiver = leaf(s.bridge, s.rank, s.message, scale(s.rank));
        of.w_pred     = leaf(s.bridge, s.rank, s.message, scale(s.rank));
        of.bias       = leaf(GGML_TYPE_F32, s.message, 1, 0.5f);
        pair_of_leaves(s, s.blocks, of.anchor_value, of.anchor_gate);
        pair_of_leaves(s, s.pairs(), of.sent_value, of.sent_gate);
        of.head       = leaf(s.head, s.hidden, s.vocab, scale(s.hidden));
        of.norm       = leaf(GGML_TYPE_F32, s.hidden, 1, 1.0f);
        of.write      = leaf(s.bridge, s.message, s.hidden, scale(s.message));
        of.logits     = leaf(GGML_TYPE_F32, s.vocab, s.tokens(), 1.0f);
        of.candidates = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, s.top_k, s.tokens());

        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        CHECK(buffer);
        for (const auto & [tensor, size] : scales) {
            fill(tensor, size);
        }
        // a readout of zeros has no direction: its feature is zeros, not NaN
        ggml_backend_tensor_memset(of.a, 0, (s.tokens() / 2) * of.a->nb[1], of.a->nb[1]);
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < s.tokens(); ++i) {
            std::vector<int32_t> all(s.vocab);
            std::iota(all.begin(), all.end(), 0);
            std::shuffle(all.begin(), all.end(), random);
            ids.insert(ids.end(), all.begin(), all.begin() + s.top_k);
        }
        ggml_backend_tensor_set(of.candidates, ids.data(), 0, ids.size() * sizeof(int32_t));
    }

private:
    static float scale(int64_t width) { return 1.0f / std::sqrt((float) width); }

    ggml_tensor * leaf(ggml_type type, int64_t ne0, int64_t ne1, float size) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
        scales.emplace_back(t, size);
        return t;
    }

    // value and gate of n tokens: two tensors, or the halves of one
    void pair_of_leaves(const shape & s, int64_t n, ggml_tensor *& value, ggml_tensor *& gate) {
        value = gate = nullptr;
        if (n == 0) {
            return;
        }
        if (!s.strided) {
            value = leaf(GGML_TYPE_F32, s.message, n, 1.0f);
            gate  = leaf(GGML_TYPE_F32, s.message, n, 1.0f);
            return;
        }
        ggml_tensor * both = leaf(GGML_TYPE_F32, 2 * s.message, n, 1.0f);
        value = ggml_view_2d(ctx.get(), both, s.message, n, both->nb[1], 0);
        gate  = ggml_view_2d(ctx.get(), both, s.message, n, both->nb[1], s.message * sizeof(float));
    }

    void fill(ggml_tensor * t, float size) {
        std::normal_distribution<float> normal(0.0f, size);
        std::vector<float> values(ggml_nelements(t));
        std::generate(values.begin(), values.end(), [&] { return normal(random); });
        std::vector<uint8_t> data(ggml_nbytes(t));
        // a flat importance matrix serves the types that insist on one
        const std::vector<float> importance(t->ne[0], 1.0f);
        // the search of some types takes seconds: of these two rows, again and again
        const bool slow = ggml_quantize_requires_imatrix(t->type) || t->type == GGML_TYPE_IQ1_M;
        const int64_t distinct = std::min(t->ne[1], slow ? 2 : t->ne[1]);
        ggml_quantize_chunk(t->type, values.data(), data.data(), 0, distinct, t->ne[0], importance.data());
        for (int64_t i = distinct; i < t->ne[1]; ++i) {
            std::memcpy(data.data() + i * t->nb[1], data.data() + i % distinct * t->nb[1], t->nb[1]);
        }
        ggml_backend_tensor_set(t, data.data(), 0, data.size());
    }

    std::mt19937 random;
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
    std::vector<std::pair<ggml_tensor *, float>> scales;
};

// What a case gives: messages and receivers [M, tokens, 2], packed rows [H, tokens].
struct outputs {
    std::vector<float> gated;
    std::vector<float> packed;
};

struct graph {
    ggml_tensor * gated;
    ggml_tensor * packed;
};

graph build_fused(ggml_context * ctx, const shape & s, const inputs & in) {
    graph g;
    g.gated = ggml_dspine_gate(ctx, in.h, in.a, in.anchor_value, in.anchor_gate, in.w_message, in.w_receiver, in.w_pred,
            in.bias, s.blocks);
    g.packed = ggml_dspine_cache(ctx, in.head, in.norm, in.write, in.h, g.gated, in.sent_value, in.sent_gate,
            in.candidates, in.logits, s.blocks, s.scored, EPS);
    return g;
}

// The formulas of dspine-ops.h, written down one by one. Blocks are the last dimension.
graph build_composed(ggml_context * ctx, const shape & s, const inputs & in) {
    auto per_block = [&](ggml_tensor * t, int64_t first, int64_t count) { // rows [first, first + count) of every block
        return ggml_view_3d(ctx, t, t->ne[0], count, s.blocks, t->nb[1], s.rows * t->nb[1], first * t->nb[1]);
    };
    auto with_first = [&](ggml_tensor * first, ggml_tensor * of_rows) { // row 1 from the anchor, row t from row t - 1
        ggml_tensor * begin = ggml_reshape_3d(ctx, ggml_cont(ctx, first), s.message, 1, s.blocks);
        return s.rows == 2 ? begin : ggml_concat(ctx, begin, per_block(of_rows, 1, s.rows - 2), 1);
    };
    ggml_tensor * feature  = ggml_rms_norm(ctx, in.a, 1e-24f / (float) s.rank);
    ggml_tensor * receiver = ggml_add(ctx, ggml_mul_mat(ctx, in.w_receiver, feature), in.bias);
    ggml_tensor * norm     = ggml_sqrt(ctx, ggml_mean(ctx, ggml_sqr(ctx, in.h)));
    ggml_tensor * value    = with_first(in.anchor_value, ggml_mul_mat(ctx, in.w_message, feature));
    ggml_tensor * gate     = with_first(in.anchor_gate,  ggml_mul_mat(ctx, in.w_pred, feature));
    gate  = ggml_sigmoid(ctx, ggml_add(ctx, gate, per_block(receiver, 1, s.rows - 1)));
    value = ggml_mul(ctx, ggml_mul(ctx, gate, value), per_block(norm, 1, s.rows - 1));
    value = ggml_pad_ext(ctx, value, 0, 0, 1, 0, 0, 0, 0, 0);

    graph g;
    g.gated = ggml_concat(ctx, ggml_reshape_2d(ctx, value, s.message, s.tokens()), receiver, 2);

    auto pack = [&](ggml_tensor * scores, int64_t first, int64_t count) {
        ggml_tensor * ids = per_block(ggml_cast(ctx, in.candidates, GGML_TYPE_F32), first, count);
        ggml_tensor * row = ggml_concat(ctx, ids, ggml_reshape_3d(ctx, scores, s.top_k * s.top_k, count, s.blocks), 0);
        return ggml_pad(ctx, row, (int) (s.hidden - s.top_k * (s.top_k + 1)), 0, 0, 0);
    };
    g.packed = ggml_fill(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.hidden, 1, s.blocks), 0.0f);
    if (s.scored > 1) {
        ggml_tensor * column = ggml_reshape_3d(ctx, in.logits, 1, s.vocab, s.tokens());
        ggml_tensor * own = ggml_reshape_2d(ctx, ggml_get_rows(ctx, column, in.candidates), s.top_k, s.tokens());
        ggml_tensor * first = ggml_repeat_4d(ctx, per_block(own, 1, 1), s.top_k, s.top_k, s.blocks, 1);
        g.packed = ggml_concat(ctx, g.packed, pack(first, 1, 1), 1);
    }
    if (s.scored > 2) {
        const int64_t n = s.scored - 2;
        auto per_position = [&](ggml_tensor * t) { // one row for the K predecessors of a position
            ggml_tensor * v = per_block(t, 2, n);
            return ggml_view_4d(ctx, v, t->ne[0], 1, n, s.blocks, v->nb[1], v->nb[1], v->nb[2], 0);
        };
        auto per_pair = [&](ggml_tensor * t) {
            return ggml_reshape_4d(ctx, ggml_cont(ctx, t), t->ne[0], s.top_k, n, s.blocks);
        };
        ggml_tensor * open = ggml_sigmoid(ctx, ggml_add(ctx, per_pair(in.sent_gate), per_position(receiver)));
        ggml_tensor * sent = ggml_mul(ctx, ggml_mul(ctx, open, per_pair(in.sent_value)), per_position(norm));
        ggml_tensor * written = ggml_mul_mat(ctx, in.write, ggml_reshape_2d(ctx, sent, s.message, s.pairs()));
        ggml_tensor * refined = ggml_rms_norm(ctx, ggml_add(ctx, per_pair(written), per_position(in.h)), EPS);
        refined = ggml_mul(ctx, refined, in.norm);
        ggml_tensor * next = ggml_reshape_1d(ctx, ggml_cont(ctx, per_block(in.candidates, 2, n)), s.pairs());
        ggml_tensor * scores = ggml_mul_mat(ctx, per_pair(ggml_get_rows(ctx, in.head, next)), refined);
        g.packed = ggml_concat(ctx, g.packed, pack(scores, 2, n), 1);
    }
    if (s.scored < s.rows) {
        g.packed = ggml_pad(ctx, g.packed, 0, (int) (s.rows - std::max<int64_t>(s.scored, 1)), 0, 0);
    }
    g.packed = ggml_reshape_2d(ctx, g.packed, s.hidden, s.tokens());
    return g;
}

using builder = std::function<graph(ggml_context *, const shape &, const inputs &)>;

std::vector<float> read(const ggml_tensor * t) {
    std::vector<float> values(ggml_nelements(t));
    ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
    return values;
}

// False where the backend does not support a node of the graph.
bool compute(ggml_backend_t backend, const shape & s, const inputs & in, const builder & build, outputs & out) {
    ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead() * 128 + ggml_graph_overhead(), nullptr, true }));
    const graph g = build(ctx.get(), s, in);
    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    for (ggml_tensor * t : { g.gated, g.packed }) {
        ggml_set_output(t);
        ggml_build_forward_expand(gf, t);
    }
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(gf, i))) {
            return false;
        }
    }
    ggml_gallocr_ptr allocator(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
    CHECK(ggml_gallocr_alloc_graph(allocator.get(), gf));
    // what a kernel does not write must not pass for zeros
    for (ggml_tensor * t : { g.gated, g.packed }) {
        ggml_backend_tensor_memset(t, 0xff, 0, ggml_nbytes(t));
    }
    CHECK(ggml_backend_graph_compute(backend, gf) == GGML_STATUS_SUCCESS);
    out = { read(g.gated), read(g.packed) };
    return true;
}

void set_threads(ggml_backend_t backend, int n) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n);
    }
}

double relative_error(const std::vector<float> & found, const std::vector<float> & expected) {
    double worst = 0.0;
    double scale = 1e-30;
    for (size_t i = 0; i < found.size(); ++i) {
        if (!(std::fabs(found[i]) <= 1e30f)) {
            return INFINITY;
        }
        worst = std::max(worst, std::fabs((double) found[i] - expected[i]));
        scale = std::max(scale, std::fabs((double) expected[i]));
    }
    return worst / scale;
}

double nmse(const std::vector<float> & found, const std::vector<float> & expected) {
    double error = 0.0;
    double power = 1e-30;
    for (size_t i = 0; i < found.size(); ++i) {
        error += std::pow((double) found[i] - expected[i], 2);
        power += std::pow((double) expected[i], 2);
    }
    return std::isfinite(error) ? error / power : INFINITY;
}

// Splits packed rows into scores and all else, which is exact: ids and zeros.
void split(const shape & s, const std::vector<float> & packed, std::vector<float> & scores, std::vector<float> & rest) {
    for (int64_t i = 0; i < s.tokens(); ++i) {
        const float * row = packed.data() + i * s.hidden;
        scores.insert(scores.end(), row + s.top_k, row + s.top_k * (s.top_k + 1));
        rest.insert(rest.end(), row, row + s.top_k);
        rest.insert(rest.end(), row + s.top_k * (s.top_k + 1), row + s.hidden);
    }
}

// Empty where `found` is right, else what is wrong.
std::string difference(const shape & s, const outputs & found, const outputs & expected, bool cpu) {
    const auto error = [&](const std::vector<float> & a, const std::vector<float> & b) {
        return cpu ? relative_error(a, b) : nmse(a, b);
    };
    const double bound = cpu ? CPU_TOLERANCE : DEVICE_NMSE;
    std::vector<float> scores, rest, expected_scores, expected_rest;
    split(s, found.packed, scores, rest);
    split(s, expected.packed, expected_scores, expected_rest);
    char line[128] = "";
    if (const double e = error(found.gated, expected.gated); !(e <= bound)) {
        snprintf(line, sizeof(line), "messages and receivers: error %.2e, at most %.0e", e, bound);
    } else if (const double e = error(scores, expected_scores); !(e <= bound)) {
        snprintf(line, sizeof(line), "scores: error %.2e, at most %.0e", e, bound);
    } else if (rest != expected_rest) {
        snprintf(line, sizeof(line), "ids or zeros differ");
    }
    return line;
}

struct device {
    ggml_backend_ptr backend;
    std::string name;
    bool cpu;
    int passed = 0, unsupported = 0;
};

bool same_bytes(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Runs a case everywhere; returns the number of failures.
int run(const shape & s, std::vector<device> & devices, ggml_backend_t reference) {
    int failures = 0;
    auto fail = [&](const device & d, const std::string & what) {
        fprintf(stderr, "FAIL %s: %s\n     %s\n", d.name.c_str(), what.c_str(), s.text().c_str());
        ++failures;
    };
    outputs expected;
    const case_inputs on_cpu(s, reference);
    CHECK(compute(reference, s, on_cpu.of, build_composed, expected));
    for (device & d : devices) {
        const case_inputs in(s, d.backend.get());
        outputs first;
        for (int threads = 1; threads <= (d.cpu ? 4 : 1); ++threads) {
            outputs found;
            set_threads(d.backend.get(), threads);
            if (!compute(d.backend.get(), s, in.of, build_fused, found)) {
                if (d.cpu) {
                    fail(d, "not supported");
                }
                ++d.unsupported;
                break;
            }
            if (threads == 1) {
                const std::string what = difference(s, found, expected, d.cpu);
                if (!what.empty()) {
                    fail(d, what);
                    break;
                }
                ++d.passed;
                first = found;
            } else if (!same_bytes(found.gated, first.gated) || !same_bytes(found.packed, first.packed)) {
                fail(d, "the result depends on the number of threads: " + std::to_string(threads));
                break;
            }
        }
    }
    return failures;
}

// BF16 products of the CPU against sums in double: on tiles of AMX where there are some, elsewhere upstream's own.
// Returns the number of failures.
int run_products() {
    const int64_t sizes[][3] = { // rows of the weight, columns, width
        { 16, 2, 32 }, { 48, 16, 96 }, { 96, 17, 256 }, { 128, 224, 128 }, { 1040, 33, 64 }, { 32, 300, 1024 },
        { 20, 16, 64 }, { 32, 16, 40 }, { 16, 1, 64 }, // not for tiles
    };
    int failures = 0;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    CHECK(cpu);
    for (const auto & [m, n, k] : sizes) {
        ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true }));
        ggml_tensor * weight = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_BF16, k, m);
        ggml_tensor * x      = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k, n);
        ggml_tensor * result = ggml_mul_mat(ctx.get(), weight, x);
        ggml_cgraph * gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, result);
        ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), cpu.get()));
        CHECK(buffer);
        // values that BF16 holds, so that nothing is rounded on the way
        auto values = [&](int64_t count) {
            std::vector<float> all(count);
            std::generate(all.begin(), all.end(), [&] { return ggml_bf16_to_fp32(ggml_fp32_to_bf16(normal(random))); });
            return all;
        };
        const std::vector<float> w = values(m * k), right = values(n * k);
        std::vector<ggml_bf16_t> stored(w.size());
        ggml_fp32_to_bf16_row(w.data(), stored.data(), (int64_t) w.size());
        ggml_backend_tensor_set(weight, stored.data(), 0, ggml_nbytes(weight));
        ggml_backend_tensor_set(x, right.data(), 0, ggml_nbytes(x));
        std::vector<float> expected(m * n), first;
        for (int64_t j = 0; j < n; ++j) {
            for (int64_t i = 0; i < m; ++i) {
                expected[j * m + i] = (float) std::inner_product(w.begin() + i * k, w.begin() + (i + 1) * k, right.begin() + j * k, 0.0);
            }
        }
        for (int threads = 1; threads <= 4; ++threads) {
            set_threads(cpu.get(), threads);
            CHECK(ggml_backend_graph_compute(cpu.get(), gf) == GGML_STATUS_SUCCESS);
            const std::vector<float> found = read(result);
            first = threads == 1 ? found : first;
            const double error = relative_error(found, expected);
            if (!(error <= CPU_TOLERANCE) || !same_bytes(found, first)) {
                fprintf(stderr, "FAIL BF16 product of %" PRId64 " x %" PRId64 " x %" PRId64 ", %d threads: error %.2e\n", m, n, k, threads, error);
                ++failures;
            }
        }
    }
    return failures;
}

// Every type whose rows ggml quantizes and reads.
std::vector<ggml_type> head_types() {
    std::vector<ggml_type> types = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 };
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const ggml_type type = (ggml_type) i;
        const ggml_type_traits * traits = ggml_get_type_traits(type);
        // the last two hold activations, never weights
        if (traits->is_quantized && traits->to_float && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K) {
            types.push_back(type);
        }
    }
    return types;
}

std::vector<shape> built_in() {
    std::vector<shape> cases;
    auto add = [&](const std::function<void(shape &)> & change) {
        shape s;
        change(s);
        cases.push_back(s);
    };
    for (ggml_type head : head_types()) {
        add([&](shape & s) { s.head = head; s.hidden = 768; s.rank = 64; s.message = 32; s.blocks = 2; });
    }
    for (ggml_type bridge : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 }) {
        add([&](shape & s) { s.bridge = bridge; s.rank = 256; s.message = 128; s.rows = s.scored = 16; s.top_k = 15; s.hidden = 512; });
        add([&](shape & s) { s.bridge = bridge; s.rank = 37; s.message = 23; s.hidden = 300; });
        add([&](shape & s) { s.bridge = bridge; s.rank = 1; s.message = 1; s.top_k = 1; s.hidden = 2; s.rows = s.scored = 3; });
    }
    for (int64_t blocks : { 1, 3 }) { // products on the tiles of AMX, where a CPU has them
        add([&](shape & s) { s.bridge = GGML_TYPE_BF16; s.rank = 128; s.message = 96; s.rows = s.scored = 16; s.top_k = 16; s.hidden = 592; s.blocks = blocks; });
        add([&](shape & s) { s.bridge = GGML_TYPE_BF16; s.rank = 64; s.message = 32; s.rows = 9; s.scored = 8; s.top_k = 16; s.hidden = 320; s.blocks = blocks; });
    }
    add([](shape & s) { s.rows = s.scored = 2; });
    add([](shape & s) { s.rows = 2; s.scored = 1; });
    add([](shape & s) { s.rows = s.scored = 3; s.top_k = 15; });
    add([](shape & s) { s.rows = 40; s.scored = 16; s.blocks = 3; });                                // the reserve pass
    add([](shape & s) { s.rows = s.scored = 16; s.top_k = 16; s.hidden = 1000; s.blocks = 8; s.strided = 1; }); // many pairs
    add([](shape & s) { s.top_k = 9; s.strided = 1; s.rank = 513; s.message = 257; });                // past a tile
    return cases;
}

shape random_case(std::mt19937 & random) {
    auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
    const std::vector<ggml_type> types = head_types();
    const ggml_type bridges[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 };
    shape s;
    s.head   = types[pick(0, (int64_t) types.size() - 1)];
    s.bridge = bridges[pick(0, 2)];
    const int64_t block = ggml_blck_size(s.head);
    s.top_k   = pick(1, 16);
    const int64_t least = s.top_k * (s.top_k + 1);
    s.hidden  = (least + pick(0, 600) + block - 1) / block * block;
    s.rank    = pick(0, 1) ? 32 * pick(1, 8) : pick(1, 200);
    s.message = pick(0, 1) ? 16 * pick(1, 8) : pick(1, 150);
    s.rows    = pick(2, 16);
    s.scored  = pick(0, 3) ? s.rows : pick(1, s.rows);
    s.blocks  = pick(0, 1) ? 1 : pick(1, 8);
    s.vocab   = pick(16, 120);
    s.strided = pick(0, 1);
    s.seed    = pick(1, 1 << 30);
    return s;
}

// false for an unknown key or value
bool parse(const std::string & argument, shape & s) {
    const size_t at = argument.find('=');
    if (at == std::string::npos) {
        return false;
    }
    const std::string key = argument.substr(0, at), value = argument.substr(at + 1);
    const std::map<std::string, int64_t *> numbers = {
        { "hidden", &s.hidden }, { "rank", &s.rank }, { "message", &s.message }, { "top_k", &s.top_k }, { "rows", &s.rows },
        { "scored", &s.scored }, { "blocks", &s.blocks }, { "vocab", &s.vocab }, { "strided", &s.strided }, { "seed", &s.seed },
    };
    if (const auto found = numbers.find(key); found != numbers.end()) {
        *found->second = std::atoll(value.c_str());
        return true;
    }
    for (ggml_type type : head_types()) {
        if ((key == "head" || key == "bridge") && value == ggml_type_name(type)) {
            (key == "head" ? s.head : s.bridge) = type;
            return true;
        }
    }
    return false;
}

bool choose(int argc, char ** argv, std::vector<shape> & cases) {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "--types") {
        for (ggml_type type : head_types()) {
            printf("%s\n", ggml_type_name(type));
        }
        exit(0);
    }
    if (mode == "--case") {
        shape s;
        for (int i = 2; i < argc; ++i) {
            if (!parse(argv[i], s)) {
                fprintf(stderr, "test-ops: unknown '%s'\n", argv[i]);
                return false;
            }
        }
        cases = { s };
        return true;
    }
    if (mode == "--random" && argc != 4) {
        fprintf(stderr, "test-ops: --random N SEED\n");
        return false;
    }
    if (mode.empty()) {
        cases = built_in();
    } else if (mode != "--random") {
        fprintf(stderr, "test-ops: unknown '%s'\n", mode.c_str());
        return false;
    }
    std::mt19937 random(mode.empty() ? 1 : (uint32_t) std::atoi(argv[3]));
    for (int n = mode.empty() ? 40 : std::atoi(argv[2]); n > 0; --n) {
        cases.push_back(random_case(random));
    }
    return true;
}

} // namespace

int main(int argc, char ** argv) {
    std::vector<shape> cases;
    if (!choose(argc, argv, cases)) {
        return 2;
    }
    ggml_backend_load_all();
    std::vector<device> devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        device d;
        d.backend.reset(ggml_backend_dev_init(dev, nullptr));
        d.name = ggml_backend_dev_name(dev);
        d.cpu  = ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
        CHECK(d.backend);
        devices.push_back(std::move(d));
    }
    ggml_backend_ptr reference(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    CHECK(reference);
    set_threads(reference.get(), 1);

    int failures = run_products();
    for (const shape & s : cases) {
        failures += run(s, devices, reference.get());
    }
    for (const device & d : devices) {
        printf("%s: %d of %zu cases equal, %d not supported\n", d.name.c_str(), d.passed, cases.size(), d.unsupported);
    }
    return failures ? 1 : 0;
}
