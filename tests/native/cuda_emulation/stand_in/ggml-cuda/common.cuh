// Stands in for upstream's header of this name where kernels are compiled for the CPU: what native/cuda uses of it.
#pragma once

#include "../block.h"

#include "ggml-impl.h"
#include "ggml.h"

#include <cmath>
#include <memory>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static // one block runs at a time

struct alignas(16) int4   { int   x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

inline float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
inline float  rsqrtf(float x) { return 1.0f/std::sqrt(x); }
inline int    min(int a, int b) { return std::min(a, b); }
inline int    max(int a, int b) { return std::max(a, b); }

struct half {
    ggml_fp16_t bits;

    half() = default;
    half(float x) : bits(ggml_fp32_to_fp16(x)) {}
    operator float() const { return ggml_fp16_to_fp32(bits); }
};

struct nv_bfloat16 {
    ggml_bf16_t bits;

    nv_bfloat16() = default;
    nv_bfloat16(float x) : bits(ggml_fp32_to_bf16(x)) {}
    operator float() const { return ggml_bf16_to_fp32(bits); }
};

struct half2        { half x, y; };
struct nv_bfloat162 { nv_bfloat16 x, y; };

inline void __syncthreads() { emulation::running().wait(emulation::state::at_block); }
inline void ggml_cuda_pdl_sync() {}

enum class block_reduce_method { SUM };

template <block_reduce_method, unsigned block_size>
float block_reduce(float value, float * shared) {
    if (block_size != blockDim.x) {
        emulation::fail("block_reduce for another block size");
    }
    auto warp_sum = [](float x) {
        return emulation::exchange(x, [](auto of) {
            float sum = 0.0f;
            for (int i = 0; i < WARP_SIZE; ++i) {
                sum += of(i);
            }
            return sum;
        });
    };
    value = warp_sum(value);
    if (threadIdx.x%WARP_SIZE == 0) {
        shared[threadIdx.x/WARP_SIZE] = value;
    }
    __syncthreads();
    return warp_sum(threadIdx.x%WARP_SIZE < block_size/WARP_SIZE ? shared[threadIdx.x%WARP_SIZE] : 0.0f);
}

using cudaStream_t = void *;

struct ggml_cuda_kernel_launch_params {
    dim3 block_nums, block_dims;

    ggml_cuda_kernel_launch_params(dim3 grid, dim3 dims, size_t, cudaStream_t) : block_nums(grid), block_dims(dims) {}
};

template <typename Kernel, typename... Args>
void ggml_cuda_kernel_launch(Kernel kernel, const ggml_cuda_kernel_launch_params & params, Args &&... args) {
    emulation::launch(kernel, params.block_nums, params.block_dims, args...);
}

// Memory of exactly the size asked for, so that a sanitizer sees what is beyond; NaN until written.
struct ggml_cuda_pool {};

template <typename T>
struct ggml_cuda_pool_alloc {
    std::unique_ptr<char, void (*)(void *)> memory = { nullptr, std::free };

    explicit ggml_cuda_pool_alloc(ggml_cuda_pool &) {}
    ggml_cuda_pool_alloc(ggml_cuda_pool &, size_t n) { alloc(n); }

    T * alloc(size_t n) {
        memory.reset((char *) std::malloc(n*sizeof(T)));
        std::memset(memory.get(), 0xff, n*sizeof(T));
        return get();
    }

    T * get() { return (T *) memory.get(); }
};

struct ggml_backend_cuda_context {
    int            device = 0;
    ggml_cuda_pool memory;

    ggml_cuda_pool & pool()   { return memory; }
    cudaStream_t     stream() { return nullptr; }
};

struct ggml_cuda_device_info {
    struct { int cc; } devices[1];
};

inline ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info = {};
    return info;
}

inline bool ampere_mma_available(int cc) { return cc >= 800; }
