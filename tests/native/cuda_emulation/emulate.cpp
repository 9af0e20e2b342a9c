// emulate FOLDER OP ORDER CC key=value...: compute one operation of native/cuda, on what compute() is linked in.
//
// Exit code 4 where the kernels refuse the operation.
//
// Reads FOLDER/NAME.f32 (weights and activations) and candidates.i32, writes FOLDER/out.f32. Keys are the sizes, and the
// types `bridge` and `head`, as ggml names them. Weights are converted, so values should be ones that the types hold.
#include "compute.h"

#include "dspine-cuda.cuh"
#include "dspine-ops.h"
#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

std::string                        folder;
std::map<std::string, std::string> keys;
std::vector<std::unique_ptr<char, void (*)(void *)>> memory;

int64_t size_of(const char * key) {
    const auto found = keys.find(key);
    if (found == keys.end()) {
        std::fprintf(stderr, "emulate: no %s=\n", key);
        std::exit(2);
    }
    return std::stoll(found->second);
}

ggml_type type_of(const char * key) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * name = ggml_type_name((ggml_type) i);
        if (name && keys[key] == name) {
            return (ggml_type) i;
        }
    }
    std::fprintf(stderr, "emulate: %s=%s is no type\n", key, keys[key].c_str());
    std::exit(2);
}

void allocate(ggml_tensor * t) {
    memory.emplace_back((char *) std::malloc(ggml_nbytes(t)), std::free);
    t->data = memory.back().get();
    std::memset(t->data, 0xff, ggml_nbytes(t));
}

template <typename T>
std::vector<T> read(const char * name, size_t n, const char * suffix) {
    std::vector<T> values(n);
    std::ifstream file(folder + "/" + name + suffix, std::ios::binary);
    if (!file.read((char *) values.data(), n*sizeof(T)) || file.peek() != EOF) {
        std::fprintf(stderr, "emulate: %s%s does not hold %zu elements\n", name, suffix, n);
        std::exit(2);
    }
    return values;
}

ggml_tensor * tensor(ggml_context * ctx, const char * name, ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
    allocate(t);
    const auto values = read<float>(name, ggml_nelements(t), ".f32");
    ggml_quantize_chunk(type, values.data(), t->data, 0, ne1*ne2, ne0, nullptr);
    return t;
}

// two [width, n] tensors whose rows alternate in one buffer, with a gap, as views of one product are
std::pair<ggml_tensor *, ggml_tensor *> strided(ggml_context * ctx, const char * first, const char * second, int64_t width, int64_t n) {
    ggml_tensor * both = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 2*width + 3, n);
    allocate(both);
    auto view = [&](const char * name, int64_t offset) {
        const auto values = read<float>(name, width*n, ".f32");
        for (int64_t i = 0; i < n; ++i) {
            std::memcpy((char *) both->data + i*both->nb[1] + offset, values.data() + i*width, width*sizeof(float));
        }
        ggml_tensor * t = ggml_view_2d(ctx, both, width, n, both->nb[1], offset);
        t->data = (char *) both->data + offset;
        return t;
    };
    return { view(first, 0), view(second, (width + 1)*sizeof(float)) };
}

ggml_tensor * gate(ggml_context * ctx) {
    const int64_t n_embd = size_of("n_embd"), rank = size_of("rank"), message = size_of("message");
    const int64_t n = size_of("n_blocks"), rows = size_of("rows")*n;
    const ggml_type type = type_of("bridge");
    const auto anchor = strided(ctx, "anchor_value", "anchor_gate", message, n);
    return ggml_dspine_gate(ctx, tensor(ctx, "h", GGML_TYPE_F32, n_embd, rows), tensor(ctx, "a", GGML_TYPE_F32, rank, rows),
        anchor.first, anchor.second, tensor(ctx, "w_message", type, rank, message),
        tensor(ctx, "w_receiver", type, rank, message), tensor(ctx, "w_pred", type, rank, message),
        tensor(ctx, "bias", GGML_TYPE_F32, message), n);
}

ggml_tensor * cache(ggml_context * ctx) {
    const int64_t n_embd = size_of("n_embd"), message = size_of("message"), top_k = size_of("top_k");
    const int64_t n = size_of("n_blocks"), rows = size_of("rows")*n, scored = size_of("scored");
    const int64_t n_vocab = size_of("n_vocab"), n_pairs = top_k*std::max<int64_t>(scored - 2, 0)*n;
    std::pair<ggml_tensor *, ggml_tensor *> sent = {};
    if (n_pairs) {
        sent = strided(ctx, "sent_value", "sent_gate", message, n_pairs);
    }
    ggml_tensor * candidates = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, top_k, rows);
    allocate(candidates);
    const auto ids = read<int32_t>("candidates", ggml_nelements(candidates), ".i32");
    std::memcpy(candidates->data, ids.data(), ggml_nbytes(candidates));
    return ggml_dspine_cache(ctx, tensor(ctx, "head", type_of("head"), n_embd, n_vocab), tensor(ctx, "norm", GGML_TYPE_F32, n_embd),
        tensor(ctx, "write", type_of("bridge"), message, n_embd), tensor(ctx, "h", GGML_TYPE_F32, n_embd, rows),
        tensor(ctx, "gated", GGML_TYPE_F32, message, rows, 2), sent.first, sent.second, candidates,
        tensor(ctx, "logits", GGML_TYPE_F32, n_vocab, rows), n, scored, std::stof(keys["eps"]));
}

// a device that gathers rows of these types
bool gathers(ggml_backend_dev_t, const ggml_tensor * op) {
    const ggml_type type = op->src[0]->type;
    return op->op == GGML_OP_GET_ROWS && (type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: %s FOLDER gate|cache ORDER CC key=value...\n", argv[0]);
        return 2;
    }
    folder = argv[1];
    for (int i = 5; i < argc; ++i) {
        const std::string pair = argv[i];
        keys[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
    }
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(
        ggml_init({ 64*ggml_tensor_overhead(), nullptr, true }), ggml_free);
    ggml_tensor * out = std::string(argv[2]) == "gate" ? gate(ctx.get()) : cache(ctx.get());
    allocate(out);
    ggml_backend_device gpu = {};
    gpu.iface.supports_op = gathers;
    if (!dspine_cuda_supports_op(&gpu, out)) {
        std::fprintf(stderr, "emulate: not supported\n");
        return 4;
    }
    compute(out, std::atoi(argv[3]), std::atoi(argv[4]));
    std::ofstream(folder + "/out.f32", std::ios::binary).write((const char *) out->data, ggml_nbytes(out));
    return 0;
}
