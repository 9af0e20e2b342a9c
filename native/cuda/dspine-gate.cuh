// GGML_OP_DSPINE_GATE: the message of an adjacent injection. See ggml_dspine_gate in native/src/dspine-ops.h.
#pragma once

#include "dspine-product.cuh"

static constexpr int DSPINE_GATE_THREADS = 256;
static constexpr int DSPINE_GATE_WARPS   = DSPINE_GATE_THREADS / WARP_SIZE;
static constexpr int DSPINE_GATE_TILE    = 16; // elements of the message, and rows, of one thread block

static_assert(DSPINE_GATE_TILE*DSPINE_GATE_TILE == DSPINE_GATE_THREADS, "a thread finishes one element of one row");

// Which products a row takes part in. Value and gate are what the row before sent, the receiver is the row's own.
enum dspine_gate_product { DSPINE_VALUE, DSPINE_GATE, DSPINE_RECEIVER, DSPINE_PRODUCTS };

struct dspine_gate_args {
    const void  * features;           // T [rank, rows]
    const float * norms;              // [rows]: ||h|| / sqrt(n_embd)
    const void  * w[DSPINE_PRODUCTS]; // T [rank, message]
    const float * bias;               // [message]
    dspine_rows   anchor_value;       // [message, n_blocks]
    dspine_rows   anchor_gate;
    float       * dst;                // [message, rows, 2]
    int           rank;
    int           message;
    int           rows;               // of all blocks
    int           block_rows;
};

// features = sqrt(R) a / max(||a||, 1e-12), rounded to the weights' type as a matrix product would; norms of h.
// One thread block per row.
template <typename T>
static __global__ void __launch_bounds__(DSPINE_GATE_THREADS) dspine_feature_kernel(
        const dspine_rows h, const int n_embd, const dspine_rows a, const int rank, T * features, float * norms) {
    __shared__ float shared[2][WARP_SIZE];
    ggml_cuda_pdl_sync();

    const int     row     = blockIdx.x;
    const float * readout = a[row];
    const float   hh = dspine_sum_of_squares<DSPINE_GATE_THREADS>(h[row],  n_embd, shared[0]);
    const float   aa = dspine_sum_of_squares<DSPINE_GATE_THREADS>(readout, rank,   shared[1]);

    const float scale = rsqrtf(aa/rank + 1e-24f/rank);
    for (int i = threadIdx.x; i < rank; i += DSPINE_GATE_THREADS) {
        features[(int64_t) row*rank + i] = ggml_cuda_cast<T>(scale*readout[i]);
    }
    if (threadIdx.x == 0) {
        norms[row] = sqrtf(hh/n_embd);
    }
}

// The products of a tile on the tensor cores: the warps share the contraction, and their parts are added in order.
template <typename T>
static __device__ __forceinline__ void dspine_gate_products_mma(
        const dspine_gate_args & args, const int m0, const int r0, float (&product)[DSPINE_PRODUCTS]) {
    using tile = ggml_cuda_mma::tile<16, 8, float>;
    __shared__ float parts[DSPINE_GATE_WARPS][DSPINE_PRODUCTS][DSPINE_GATE_TILE][DSPINE_GATE_TILE];

    const int lane  = threadIdx.x;
    const int warp  = threadIdx.y;
    const int group = lane/4;
    const int first = DSPINE_CHUNK*warp + 8*(lane%4);

    // rows beyond the end are read again instead; nobody reads their products
    const int64_t m_low  = min(m0 + group,     args.message - 1);
    const int64_t m_high = min(m0 + group + 8, args.message - 1);
    const T * own[2];
    const T * sender[2];
#pragma unroll
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
        const int64_t row = min(r0 + 8*half_tile + group, args.rows - 1);
        own[half_tile]    = (const T *) args.features + row*args.rank;
        sender[half_tile] = (const T *) args.features + (row > 0 ? row - 1 : 0)*args.rank;
    }

    tile sum[DSPINE_PRODUCTS][2];
    for (int k = first; k < args.rank; k += DSPINE_CHUNK*DSPINE_GATE_WARPS) {
        const dspine_chunk<T> received[2] = { dspine_chunk<T>(own[0]    + k), dspine_chunk<T>(own[1]    + k) };
        const dspine_chunk<T> sent[2]     = { dspine_chunk<T>(sender[0] + k), dspine_chunk<T>(sender[1] + k) };
#pragma unroll
        for (int p = 0; p < DSPINE_PRODUCTS; ++p) {
            const T * w = (const T *) args.w[p];
            const dspine_chunk<T> low (w + m_low *args.rank + k);
            const dspine_chunk<T> high(w + m_high*args.rank + k);
#pragma unroll
            for (int half_tile = 0; half_tile < 2; ++half_tile) {
                dspine_mma<T>(sum[p][half_tile], low, high, p == DSPINE_RECEIVER ? received[half_tile] : sent[half_tile]);
            }
        }
    }

#pragma unroll
    for (int p = 0; p < DSPINE_PRODUCTS; ++p) {
#pragma unroll
        for (int half_tile = 0; half_tile < 2; ++half_tile) {
#pragma unroll
            for (int l = 0; l < tile::ne; ++l) {
                parts[warp][p][8*half_tile + tile::get_j(l)][tile::get_i(l)] = sum[p][half_tile].x[l];
            }
        }
    }
    __syncthreads();
    const int thread = WARP_SIZE*warp + lane;
#pragma unroll
    for (int p = 0; p < DSPINE_PRODUCTS; ++p) {
        product[p] = 0.0f;
#pragma unroll
        for (int part = 0; part < DSPINE_GATE_WARPS; ++part) {
            product[p] += parts[part][p][thread/DSPINE_GATE_TILE][thread%DSPINE_GATE_TILE];
        }
    }
}

// The same in F32 for any rank and type: weights and features pass through shared memory, a thread adds up its own.
template <typename T>
static __device__ __forceinline__ void dspine_gate_products_fma(
        const dspine_gate_args & args, const int m0, const int r0, float (&product)[DSPINE_PRODUCTS]) {
    constexpr int depth = 32;
    __shared__ float w[DSPINE_PRODUCTS][DSPINE_GATE_TILE][depth + 1];
    __shared__ float features[DSPINE_GATE_TILE + 1][depth + 1]; // row 0 is the one before the tile

    const int thread = WARP_SIZE*threadIdx.y + threadIdx.x;
    const int m      = thread%DSPINE_GATE_TILE;
    const int row    = thread/DSPINE_GATE_TILE;
#pragma unroll
    for (int p = 0; p < DSPINE_PRODUCTS; ++p) {
        product[p] = 0.0f;
    }
    for (int k0 = 0; k0 < args.rank; k0 += depth) {
        const int  k     = k0 + threadIdx.x;
        const bool valid = k < args.rank;
#pragma unroll
        for (int p = 0; p < DSPINE_PRODUCTS; ++p) {
            for (int i = threadIdx.y; i < DSPINE_GATE_TILE; i += DSPINE_GATE_WARPS) {
                const int64_t at = (int64_t) min(m0 + i, args.message - 1)*args.rank + k;
                w[p][i][threadIdx.x] = valid ? ggml_cuda_cast<float>(((const T *) args.w[p])[at]) : 0.0f;
            }
        }
        for (int i = threadIdx.y; i < DSPINE_GATE_TILE + 1; i += DSPINE_GATE_WARPS) {
            const int64_t at = (int64_t) min(max(r0 + i - 1, 0), args.rows - 1)*args.rank + k;
            features[i][threadIdx.x] = valid ? ggml_cuda_cast<float>(((const T *) args.features)[at]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < depth; ++i) {
            product[DSPINE_VALUE]    += w[DSPINE_VALUE]   [m][i]*features[row    ][i];
            product[DSPINE_GATE]     += w[DSPINE_GATE]    [m][i]*features[row    ][i];
            product[DSPINE_RECEIVER] += w[DSPINE_RECEIVER][m][i]*features[row + 1][i];
        }
        __syncthreads();
    }
}

// A tile of messages and rows; a thread finishes one element of one row.
template <typename T, bool use_mma>
static __global__ void __launch_bounds__(DSPINE_GATE_THREADS) dspine_gate_kernel(const dspine_gate_args args) {
    const int m0 = DSPINE_GATE_TILE*blockIdx.x;
    const int r0 = DSPINE_GATE_TILE*blockIdx.y;
    ggml_cuda_pdl_sync();

    float product[DSPINE_PRODUCTS];
    if constexpr (use_mma) {
        dspine_gate_products_mma<T>(args, m0, r0, product);
    } else {
        dspine_gate_products_fma<T>(args, m0, r0, product);
    }

    const int thread = WARP_SIZE*threadIdx.y + threadIdx.x;
    const int m      = m0 + thread%DSPINE_GATE_TILE;
    const int row    = r0 + thread/DSPINE_GATE_TILE;
    if (m >= args.message || row >= args.rows) {
        return;
    }
    const int   block    = row/args.block_rows;
    const int   t        = row%args.block_rows;
    const float receiver = product[DSPINE_RECEIVER] + args.bias[m];

    float message = 0.0f;
    if (t > 0) {
        const float value = t == 1 ? args.anchor_value[block][m] : product[DSPINE_VALUE];
        const float gate  = t == 1 ? args.anchor_gate [block][m] : product[DSPINE_GATE];
        message = args.norms[row]*(dspine_sigmoid(receiver + gate)*value);
    }
    const int64_t plane = (int64_t) args.rows*args.message;
    const int64_t at    = (int64_t) row*args.message + m;
    args.dst[at]         = message;
    args.dst[plane + at] = receiver;
}

template <typename T>
static void dspine_gate(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * h         = dst->src[0];
    const ggml_tensor * a         = dst->src[1];
    const ggml_tensor * w_message = dst->src[4];
    const int rows = h->ne[1];

    dspine_gate_args args = {};
    args.w[DSPINE_VALUE]    = w_message->data;
    args.w[DSPINE_RECEIVER] = dst->src[5]->data;
    args.w[DSPINE_GATE]     = dst->src[6]->data;
    args.bias         = (const float *) dst->src[7]->data;
    args.anchor_value = dspine_rows_of(dst->src[2]);
    args.anchor_gate  = dspine_rows_of(dst->src[3]);
    args.dst          = (float *) dst->data;
    args.rank         = a->ne[0];
    args.message      = w_message->ne[1];
    args.rows         = rows;
    args.block_rows   = rows/ggml_get_op_params_i32(dst, 0);

    ggml_cuda_pool_alloc<T>     features(ctx.pool(), (size_t) rows*args.rank);
    ggml_cuda_pool_alloc<float> norms(ctx.pool(), rows);
    args.features = features.get();
    args.norms    = norms.get();

    cudaStream_t stream = ctx.stream();
    ggml_cuda_kernel_launch(dspine_feature_kernel<T>,
        ggml_cuda_kernel_launch_params(dim3(rows), dim3(DSPINE_GATE_THREADS), 0, stream),
        dspine_rows_of(h), (int) h->ne[0], dspine_rows_of(a), args.rank, features.get(), norms.get());

    const dim3 grid((args.message + DSPINE_GATE_TILE - 1)/DSPINE_GATE_TILE, (rows + DSPINE_GATE_TILE - 1)/DSPINE_GATE_TILE);
    const ggml_cuda_kernel_launch_params params(grid, dim3(WARP_SIZE, DSPINE_GATE_WARPS), 0, stream);
    if constexpr (!std::is_same_v<T, float>) {
        if (dspine_can_use_mma(w_message->type, args.rank, ggml_cuda_info().devices[ctx.device].cc)) {
            ggml_cuda_kernel_launch(dspine_gate_kernel<T, true>, params, args);
            return;
        }
    }
    ggml_cuda_kernel_launch(dspine_gate_kernel<T, false>, params, args);
}
