// The kernels on a GPU, with upstream's headers and its gather of rows but without the rest of its backend, which takes
// long to compile. Compiled, not run yet.
#include "compute.h"

#include "dspine-cuda.cuh"
#include "ggml-cuda/common.cuh"

#include <map>
#include <vector>

// -- what upstream's headers want of its backend --

static ggml_cuda_device_info & device_info() {
    static ggml_cuda_device_info info = [] {
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
        ggml_cuda_device_info found = {};
        found.device_count = 1;
        found.devices[0].cc        = 100*properties.major + 10*properties.minor;
        found.devices[0].nsm       = properties.multiProcessorCount;
        found.devices[0].warp_size = properties.warpSize;
        return found;
    }();
    return info;
}

const ggml_cuda_device_info & ggml_cuda_info() { return device_info(); }
int  ggml_cuda_get_device() { return 0; }
void ggml_cuda_set_device(int device) { CUDA_CHECK(cudaSetDevice(device)); }

void ggml_cuda_error(const char * stmt, const char * func, const char * file, int line, const char * msg) {
    GGML_ABORT("CUDA: %s in %s at %s:%d: %s", msg, func, file, line, stmt);
}

// Buffers of exactly the size asked for, so that compute-sanitizer sees what is beyond. They are kept: a stream that is
// being captured cannot allocate, and finds those of the run before.
struct exact_pool : ggml_cuda_pool {
    std::multimap<size_t, void *> spare;

    void * alloc(size_t size, size_t * actual_size) override {
        *actual_size = size;
        const auto found = spare.find(size);
        void * memory = nullptr;
        if (found != spare.end()) {
            memory = found->second;
            spare.erase(found);
        } else {
            CUDA_CHECK(cudaMalloc(&memory, size));
        }
        return memory;
    }

    void free(void * memory, size_t size) override { spare.emplace(size, memory); }

    ~exact_pool() override {
        for (const auto & entry : spare) {
            CUDA_CHECK(cudaFree(entry.second));
        }
    }
};

std::unique_ptr<ggml_cuda_pool> ggml_backend_cuda_context::new_pool_for_device(int, int) {
    return std::make_unique<exact_pool>();
}

ggml_backend_cuda_context::~ggml_backend_cuda_context() {
    CUDA_CHECK(cudaStreamDestroy(stream()));
}

// -- the operation --

// Tensors whose data is on the device for as long as this lives. A view keeps its place in what it views.
struct on_device {
    std::map<ggml_tensor *, std::pair<char *, char *>> moved; // whole tensor -> its data on the host, on the device

    static ggml_tensor * whole(ggml_tensor * t) { return t->view_src ? t->view_src : t; }

    void add(ggml_tensor * t) {
        ggml_tensor * base = whole(t);
        if (moved.count(base) == 0) {
            void * memory = nullptr;
            CUDA_CHECK(cudaMalloc(&memory, ggml_nbytes(base)));
            CUDA_CHECK(cudaMemcpy(memory, base->data, ggml_nbytes(base), cudaMemcpyHostToDevice));
            moved[base] = { (char *) base->data, (char *) memory };
            base->data  = memory;
        }
        t->data = moved[base].second + t->view_offs;
    }

    ~on_device() {
        for (const auto & entry : moved) {
            entry.first->data = entry.second.first;
            CUDA_CHECK(cudaFree(entry.second.second));
        }
    }
};

static cudaGraphExec_t captured(ggml_backend_cuda_context & ctx, ggml_tensor * out) {
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CUDA_CHECK(cudaStreamBeginCapture(ctx.stream(), cudaStreamCaptureModeRelaxed));
    dspine_cuda_compute(ctx, out);
    CUDA_CHECK(cudaStreamEndCapture(ctx.stream(), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&instance, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return instance;
}

// Order 0 launches the kernels; any other replays them from a CUDA graph, over a result that was spoilt.
void compute(ggml_tensor * out, int order, int cc) {
    if (cc < GGML_CUDA_CC_AMPERE) {
        device_info().devices[0].cc = cc; // without tensor cores for all types
    }
    ggml_backend_cuda_context ctx(0);
    on_device tensors;
    for (ggml_tensor * src : out->src) {
        if (src) {
            tensors.add(src);
        }
    }
    tensors.add(out);
    dspine_cuda_compute(ctx, out);
    if (order != 0) {
        cudaGraphExec_t graph = captured(ctx, out);
        CUDA_CHECK(cudaMemsetAsync(out->data, 0xff, ggml_nbytes(out), ctx.stream()));
        CUDA_CHECK(cudaGraphLaunch(graph, ctx.stream()));
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
        CUDA_CHECK(cudaGraphExecDestroy(graph));
    }
    CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));
    CUDA_CHECK(cudaMemcpy(tensors.moved[out].first, out->data, ggml_nbytes(out), cudaMemcpyDeviceToHost));
}
