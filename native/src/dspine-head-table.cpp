#include "dspine-head-table.h"
#include "dspine-graph.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

static constexpr int64_t PRODUCT_BYTES = 64 << 20; // of the product of the head and some columns of diag(norm) O

ggml_type dspine_head_table_type() {
    const char * set = std::getenv("DSPINE_HEAD_TABLE");
    const std::string value = set ? set : "";
    if (value.empty() || value == "off") {
        return GGML_TYPE_COUNT;
    }
    if (value == "f16" || value == "f32") {
        return value == "f16" ? GGML_TYPE_F16 : GGML_TYPE_F32;
    }
    throw std::invalid_argument("error: DSPINE_HEAD_TABLE is '" + value + "', expected f16, f32 or off\n");
}

size_t dspine_head_table_bytes(const llama_model & model_dft, const ggml_tensor * head, ggml_type type) {
    return ggml_row_size(type, model_dft.dspine.message) * head->ne[1];
}

// -- making it ------------------------------------------------------------------------------------

static ggml_backend_dev_t device_of(const ggml_tensor * weight) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(weight->buffer));
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); // memory-mapped weights have none
}

// Runs graphs whose weights lie on one device.
class device_runner {
public:
    device_runner(ggml_backend_dev_t dev, int32_t n_threads) : dev(dev), backend(ggml_backend_dev_init(dev, nullptr)) {
        check(backend != nullptr, "cannot be used");
        auto * set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
                ggml_backend_dev_backend_reg(dev), "ggml_backend_set_n_threads");
        if (set_threads) {
            set_threads(backend.get(), n_threads);
        }
        allocator.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend.get())));
    }

    // room for the tensors of `gf` that have none; their values may be set afterwards
    void place(ggml_cgraph * gf) {
        for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
            check(ggml_backend_supports_op(backend.get(), ggml_graph_node(gf, i)), std::string("cannot run ") +
                    ggml_op_desc(ggml_graph_node(gf, i)) + " for it");
        }
        check(ggml_gallocr_alloc_graph(allocator.get(), gf), "has no room for its products");
    }

    void compute(ggml_cgraph * gf) {
        check(ggml_backend_graph_compute(backend.get(), gf) == GGML_STATUS_SUCCESS, "failed to compute it");
    }

    // gives all tensors of `ctx` a buffer, kept in `table`
    void keep(ggml_context_ptr ctx, dspine_head_table & table) {
        const size_t size = ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), ggml_backend_get_default_buffer_type(backend.get()));
        ggml_backend_buffer_ptr buffer { ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()) };
        check(buffer != nullptr, "has no room for its " + std::to_string(size / 1048576) +
                " MiB; f16 takes half of what f32 does, and a smaller -c leaves more");
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        table.buffers.push_back(std::move(buffer));
        table.contexts.push_back(std::move(ctx));
    }

private:
    void check(bool ok, const std::string & what) const {
        if (!ok) {
            throw std::runtime_error("the head table (DSPINE_HEAD_TABLE): device " + std::string(ggml_backend_dev_name(dev)) + " " + what);
        }
    }

    ggml_backend_dev_t dev;
    ggml_backend_ptr   backend;
    ggml_gallocr_ptr   allocator;
};

static ggml_context_ptr new_context() {
    return ggml_context_ptr { ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }) };
}

static std::vector<float> values_of(const ggml_tensor * t) {
    std::vector<float> values(ggml_nelements(t));
    ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
    return values;
}

static void set_values(ggml_tensor * t, const float * values) {
    ggml_backend_tensor_set(t, values, 0, ggml_nbytes(t));
}

// O^T and G, from products: those work wherever the loader has put O
static void make_write(device_runner & device, ggml_tensor * write, dspine_head_table & table) {
    const int64_t message = write->ne[0];
    ggml_context_ptr scratch = new_context();
    ggml_tensor * eye = ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, message, message);
    ggml_set_input(eye);
    ggml_tensor * transposed = ggml_mul_mat(scratch.get(), write, eye);
    ggml_tensor * products   = ggml_mul_mat(scratch.get(), transposed, transposed);
    for (ggml_tensor * t : { transposed, products }) {
        ggml_prec_set_acc(t, GGML_PREC_F32);
        ggml_set_output(t);
    }
    ggml_cgraph * gf = ggml_new_graph(scratch.get());
    ggml_build_forward_expand(gf, products);
    device.place(gf);

    std::vector<float> identity(message * message);
    for (int64_t i = 0; i < message; ++i) {
        identity[i * message + i] = 1.0f;
    }
    set_values(eye, identity.data());
    device.compute(gf);

    ggml_context_ptr ctx = new_context();
    table.write_t = ggml_dup_tensor(ctx.get(), transposed);
    table.gram    = ggml_dup_tensor(ctx.get(), products);
    ggml_set_name(table.write_t, "dspine_write_t");
    ggml_set_name(table.gram,    "dspine_write_gram");
    device.keep(std::move(ctx), table);
    set_values(table.write_t, values_of(transposed).data());
    set_values(table.gram,    values_of(products).data());
}

// columns [first, first + count) of T from `scaled`, the same columns of diag(norm) O, [n_embd, count]
static void make_columns(device_runner & device, ggml_tensor * head, const float * scaled, int64_t first, int64_t count, ggml_tensor * rows) {
    ggml_context_ptr scratch = new_context();
    ggml_tensor * columns = ggml_new_tensor_2d(scratch.get(), GGML_TYPE_F32, head->ne[0], count);
    ggml_set_input(columns);
    ggml_tensor * product = ggml_mul_mat(scratch.get(), head, columns);
    ggml_prec_set_acc(product, GGML_PREC_F32);
    ggml_tensor * place = ggml_view_2d(scratch.get(), rows, count, rows->ne[1], rows->nb[1], first * rows->nb[0]);
    ggml_cgraph * gf = ggml_new_graph(scratch.get());
    ggml_build_forward_expand(gf, ggml_cpy(scratch.get(), ggml_transpose(scratch.get(), product), place));
    device.place(gf);
    set_values(columns, scaled);
    device.compute(gf);
}

std::shared_ptr<const dspine_head_table> dspine_make_head_table(const llama_model & model_dft, ggml_tensor * head,
        ggml_type type, int32_t n_threads) {
    const int64_t t_start = ggml_time_us();
    auto table = std::make_shared<dspine_head_table>();
    ggml_tensor * write = model_dft.dspine.layers.back().write;
    const int64_t message = write->ne[0];
    const int64_t n_embd  = write->ne[1];

    device_runner drafter(device_of(write), n_threads);
    make_write(drafter, write, *table);

    std::vector<float> scaled = values_of(table->write_t);
    const std::vector<float> norm = values_of(model_dft.output_norm);
    for (int64_t m = 0; m < message; ++m) {
        for (int64_t i = 0; i < n_embd; ++i) {
            scaled[m * n_embd + i] *= norm[i];
        }
    }

    device_runner target(device_of(head), n_threads);
    ggml_context_ptr ctx = new_context();
    table->rows = ggml_new_tensor_2d(ctx.get(), type, message, head->ne[1]);
    ggml_set_name(table->rows, "dspine_head_table");
    target.keep(std::move(ctx), *table);
    const int64_t step = std::max<int64_t>(1, PRODUCT_BYTES / (int64_t) (head->ne[1] * sizeof(float)));
    for (int64_t first = 0; first < message; first += step) {
        make_columns(target, head, scaled.data() + first * n_embd, first, std::min(step, message - first), table->rows);
    }

    LLAMA_LOG_INFO("dspine: head table of %lld x %lld %s values, %.1f MiB in a %s buffer, made in %.1f s: the drafter reads no rows of "
            "the head (%s in a %s buffer)\n", (long long) head->ne[1], (long long) message, ggml_type_name(type),
            ggml_nbytes(table->rows) / 1048576.0, ggml_backend_buffer_name(table->rows->buffer), (ggml_time_us() - t_start) / 1e6,
            ggml_type_name(head->type), ggml_backend_buffer_name(head->buffer));
    return table;
}

// -- using it -------------------------------------------------------------------------------------

// Scores [K (j), K (k), scored - 2, n_blocks] as of pair_scores. logits: those of the candidates, [K, n_tokens].
ggml_tensor * dspine_graph::table_scores(const dspine_head_table & table, ggml_tensor * candidates, ggml_tensor * logits, ggml_tensor * head_scale) {
    ggml_context * ctx0 = g.ctx0;
    const int64_t top_k = candidates->ne[0];
    const int64_t n_pos = scored - 2;
    const int64_t n_all = top_k * n_pos * n_blocks;

    auto ids = [&](int64_t first) {
        return ggml_reshape_1d(ctx0, ggml_cont(ctx0, rows_view(candidates, first, n_pos)), n_all);
    };
    // one row per position, shared by its K predecessors
    auto per_position = [&](ggml_tensor * t) {
        ggml_tensor * v = rows_view(t, 2, n_pos);
        return ggml_view_4d(ctx0, v, t->ne[0], 1, n_pos, n_blocks, v->nb[1], v->nb[1], v->nb[2], 0);
    };
    auto per_pair = [&](ggml_tensor * t) {
        return ggml_view_4d(ctx0, t, t->ne[0], top_k, n_pos, n_blocks, t->nb[1], top_k * t->nb[1], n_pos * top_k * t->nb[1], 0);
    };
    auto mean_square = [&](ggml_tensor * t) {
        return ggml_mean(ctx0, ggml_sqr(ctx0, t));
    };

    const messages sent = messages_of(ids(1));
    ggml_tensor * gate  = ggml_sigmoid(ctx0, ggml_add(ctx0, per_pair(sent.gate), per_position(last_receiver)));
    ggml_tensor * value = ggml_mul(ctx0, gate, per_pair(sent.value));
    value = ggml_mul(ctx0, value, per_position(ggml_sqrt(ctx0, mean_square(last_hidden))));
    ggml_tensor * diff  = ggml_sub(ctx0, value, per_position(last_message));

    ggml_tensor * squares = ggml_scale_bias(ctx0, mean_square(last_written), 1.0f, g.norm_rms_eps);
    ggml_tensor * square  = per_position(squares);
    ggml_tensor * slope  = ggml_scale(ctx0, ggml_mul_mat(ctx0, table.write_t, last_written), 2.0f);
    ggml_tensor * bend = per_pair(ggml_mul_mat(ctx0, table.gram, ggml_reshape_2d(ctx0, diff, model.message, n_all)));
    slope = ggml_add(ctx0, bend, per_position(slope));
    ggml_tensor * change = ggml_sum_rows(ctx0, ggml_mul(ctx0, slope, diff));
    ggml_tensor * scale  = ggml_add(ctx0, ggml_scale(ctx0, change, 1.0f / g.n_embd), square);
    scale = ggml_sqrt(ctx0, ggml_clamp(ctx0, scale, g.norm_rms_eps, INFINITY)); // never less, but for rounding

    ggml_tensor * moved = ggml_mul_mat(ctx0, per_pair(ggml_get_rows(ctx0, table.rows, ids(2))), diff);
    if (head_scale) {
        moved = ggml_mul(ctx0, moved, head_scale);
    }
    ggml_tensor * own = ggml_mul(ctx0, per_position(logits), per_position(ggml_sqrt(ctx0, squares))); // CUDA takes no strided root
    return ggml_div(ctx0, ggml_add(ctx0, moved, own), scale);
}
