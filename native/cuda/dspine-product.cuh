// What both fused operations share: rows in device memory, and a warp's step of a product on the tensor cores.
#pragma once

#include "ggml-cuda/common.cuh"
#include "ggml-cuda/convert.cuh"
#include "ggml-cuda/mma.cuh"

#include <cstring>

// F32 rows, `stride` bytes apart
struct dspine_rows {
    const char * data;
    size_t       stride;

    __device__ __forceinline__ const float * operator[](const int row) const {
        return (const float *) (data + row*stride);
    }
};

static dspine_rows dspine_rows_of(const ggml_tensor * t) {
    return { (const char *) t->data, t->nb[1] };
}

static __device__ __forceinline__ float dspine_sigmoid(const float x) {
    return 1.0f / (1.0f + expf(-x));
}

// Sum of squares of a row, known to every thread of a block of `threads`. `shared` must not be in use by another sum.
template <int threads>
static __device__ __forceinline__ float dspine_sum_of_squares(const float * row, const int n, float * shared) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += threads) {
        sum += row[i]*row[i];
    }
    return block_reduce<block_reduce_method::SUM, threads>(sum, shared);
}

// Two elements of a 16-bit type in one register. F32 has no tensor core that is exact; there the name is only unused.
template <typename T> struct dspine_pair_of              { using type = half2; };
template <>           struct dspine_pair_of<nv_bfloat16> { using type = nv_bfloat162; };

// Steps along the contraction that one chunk covers: 8 elements in each of the 4 lanes that share a row.
static constexpr int DSPINE_CHUNK = 32;

// The 8 elements of a row that a lane brings to a product of two rows. A sum over the contraction may take its elements
// in any order, so each lane reads 16 bytes at once, lane % 4 telling which, and calls them what the instruction wants.
template <typename T>
struct dspine_chunk {
    typename dspine_pair_of<T>::type x[4];

    __device__ __forceinline__ explicit dspine_chunk(const T * elements) {
        const int4 raw = *(const int4 *) elements;
        memcpy(x, &raw, sizeof(x));
    }
};

// sum[i][j] += rows i and i + 8 of A times row j of B, over one chunk. Each lane has chunks of rows lane / 4.
template <typename T>
static __device__ __forceinline__ void dspine_mma(
        ggml_cuda_mma::tile<16, 8, float> & sum, const dspine_chunk<T> & a_low, const dspine_chunk<T> & a_high, const dspine_chunk<T> & b) {
    using pair = typename dspine_pair_of<T>::type;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        ggml_cuda_mma::tile<16, 8, pair> A;
        ggml_cuda_mma::tile< 8, 8, pair> B;
        A.x[0] = a_low .x[2*step + 0];
        A.x[1] = a_high.x[2*step + 0];
        A.x[2] = a_low .x[2*step + 1];
        A.x[3] = a_high.x[2*step + 1];
        B.x[0] = b.x[2*step + 0];
        B.x[1] = b.x[2*step + 1];
        ggml_cuda_mma::mma(sum, A, B);
    }
}

// Whether products along `n` elements of type `type` can use the tensor cores of a device of compute capability `cc`.
static bool dspine_can_use_mma(const ggml_type type, const int64_t n, const int cc) {
    return type != GGML_TYPE_F32 && n % DSPINE_CHUNK == 0 && ampere_mma_available(cc);
}
