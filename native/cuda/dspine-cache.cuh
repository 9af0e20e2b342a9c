// GGML_OP_DSPINE_CACHE: scores of neighbouring candidates. See ggml_dspine_cache in native/src/dspine-ops.h.
//
// A position is a row t >= 2 of a block; its pairs are those of the candidates of row t - 1 with its own. The gathered
// head rows are written to memory, n_embd wide per candidate; of a pair only its message and its score are.
#pragma once

#include "dspine-product.cuh"
#include "ggml-cuda/getrows.cuh"

static constexpr int DSPINE_MAX_TOP_K       = 16; // predecessors of a position are padded to this many
static constexpr int DSPINE_TILE_POSITIONS  = 4;  // positions of one thread block, a warp for each
static constexpr int DSPINE_TILE_PAIRS      = DSPINE_TILE_POSITIONS*DSPINE_MAX_TOP_K;
static constexpr int DSPINE_TILE_WIDTH      = 64; // of n_embd
static constexpr int DSPINE_TILE_STRIDE     = DSPINE_TILE_WIDTH + 4; // 16 bytes more: rows start in other banks
static constexpr int DSPINE_MESSAGE_THREADS = 256;
static constexpr int DSPINE_SCORE_THREADS   = DSPINE_TILE_POSITIONS*WARP_SIZE;
static constexpr int DSPINE_FINISH_THREADS  = DSPINE_MAX_TOP_K*DSPINE_MAX_TOP_K; // one per score

struct dspine_cache_shape {
    int n_embd;
    int message;
    int top_k;
    int block_rows;
    int scored;      // rows of a block that get scores
    int n_positions; // of all blocks

    int tiles() const { return (n_embd + DSPINE_TILE_WIDTH - 1)/DSPINE_TILE_WIDTH; }

    int groups() const { return (n_positions + DSPINE_TILE_POSITIONS - 1)/DSPINE_TILE_POSITIONS; }

    // sums that a tile of n_embd contributes to a position: top_k rows of dots, then top_k squares
    __host__ __device__ int n_partial() const { return top_k*(top_k + 1); }

    __device__ int row_of(const int position) const {
        return position/(scored - 2)*block_rows + 2 + position%(scored - 2);
    }
};

struct dspine_message_args {
    dspine_rows h;        // [n_embd, rows]
    dspine_rows receiver; // [message, rows]
    dspine_rows value;    // [message, top_k*n_positions]
    dspine_rows gate;
    void      * messages; // T [message, DSPINE_MAX_TOP_K, n_positions rounded up to whole groups]
};

// messages = (||h|| / sqrt(H)) sigmoid(receiver + gate) value, rounded as a matrix product would; zeros where no pair is.
// One thread block per predecessor.
template <typename T>
static __global__ void __launch_bounds__(DSPINE_MESSAGE_THREADS) dspine_message_kernel(
        const dspine_cache_shape shape, const dspine_message_args args) {
    __shared__ float shared[WARP_SIZE];
    ggml_cuda_pdl_sync();

    const int position = blockIdx.x;
    const int k        = blockIdx.y;
    T * message = (T *) args.messages + ((int64_t) position*DSPINE_MAX_TOP_K + k)*shape.message;
    if (position >= shape.n_positions || k >= shape.top_k) {
        for (int m = threadIdx.x; m < shape.message; m += DSPINE_MESSAGE_THREADS) {
            message[m] = ggml_cuda_cast<T>(0.0f);
        }
        return;
    }
    const int     row      = shape.row_of(position);
    const float * receiver = args.receiver[row];
    const float * value    = args.value[position*shape.top_k + k];
    const float * gate     = args.gate [position*shape.top_k + k];
    const float   norm     = sqrtf(dspine_sum_of_squares<DSPINE_MESSAGE_THREADS>(args.h[row], shape.n_embd, shared)/shape.n_embd);
    for (int m = threadIdx.x; m < shape.message; m += DSPINE_MESSAGE_THREADS) {
        message[m] = ggml_cuda_cast<T>(norm*(dspine_sigmoid(receiver[m] + gate[m])*value[m]));
    }
}

struct dspine_score_args {
    dspine_rows   h;        // [n_embd, rows]
    const void  * write;    // T [message, n_embd]
    const void  * messages; // of dspine_message_kernel
    const float * heads;    // [n_embd, top_k, n_positions]
    const float * norm;     // [n_embd]
    float       * partial;  // [n_partial, tiles, n_positions]
};

// Rows of n_embd after a write, by pair: what a thread block keeps of them.
using dspine_refined = float[DSPINE_TILE_PAIRS][DSPINE_TILE_STRIDE];

// refined = h + O message for a tile of n_embd and the pairs of four positions, on the tensor cores. A warp takes 16
// rows of O and all pairs. Zeros beyond n_embd.
template <typename T>
static __device__ __forceinline__ void dspine_refine_mma(
        const dspine_cache_shape & shape, const dspine_score_args & args, const int i0, const int position0, dspine_refined & refined) {
    using tile = ggml_cuda_mma::tile<16, 8, float>;
    constexpr int n_tiles = DSPINE_TILE_PAIRS/tile::J;
    const int lane  = threadIdx.x;
    const int group = lane/4;
    const int first = 8*(lane%4);
    const int i_own = i0 + 16*threadIdx.y;

    // rows beyond the end are read again instead, and their products are not stored
    const T * low  = (const T *) args.write + (int64_t) min(i_own + group,     shape.n_embd - 1)*shape.message;
    const T * high = (const T *) args.write + (int64_t) min(i_own + group + 8, shape.n_embd - 1)*shape.message;
    const T * messages = (const T *) args.messages + ((int64_t) position0*DSPINE_MAX_TOP_K + group)*shape.message;

    tile sum[n_tiles];
    for (int k = first; k < shape.message; k += DSPINE_CHUNK) {
        const dspine_chunk<T> a_low (low  + k);
        const dspine_chunk<T> a_high(high + k);
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
            dspine_mma<T>(sum[n], a_low, a_high, dspine_chunk<T>(messages + n*tile::J*shape.message + k));
        }
    }
#pragma unroll
    for (int n = 0; n < n_tiles; ++n) {
        const int     position = position0 + n*tile::J/DSPINE_MAX_TOP_K;
        const bool    valid    = position < shape.n_positions;
        const float * h        = args.h[valid ? shape.row_of(position) : 0];
#pragma unroll
        for (int l = 0; l < tile::ne; ++l) {
            const int i = i_own + tile::get_i(l);
            refined[n*tile::J + tile::get_j(l)][i - i0] = valid && i < shape.n_embd ? h[i] + sum[n].x[l] : 0.0f;
        }
    }
}

// The same in F32 for any message and type: a thread has one predecessor of each position and every eighth row of O.
template <typename T>
static __device__ __forceinline__ void dspine_refine_fma(
        const dspine_cache_shape & shape, const dspine_score_args & args, const int i0, const int position0, dspine_refined & refined) {
    constexpr int depth    = 16;
    constexpr int i_stride = DSPINE_SCORE_THREADS/DSPINE_MAX_TOP_K;
    constexpr int n_i      = DSPINE_TILE_WIDTH/i_stride;
    __shared__ float w[depth][DSPINE_TILE_WIDTH + 1];
    __shared__ float messages[depth][DSPINE_TILE_PAIRS + 1];

    const int thread = WARP_SIZE*threadIdx.y + threadIdx.x;
    const int k      = thread%DSPINE_MAX_TOP_K;
    const int i_own  = thread/DSPINE_MAX_TOP_K;

    float sum[n_i][DSPINE_TILE_POSITIONS] = {};
    for (int m0 = 0; m0 < shape.message; m0 += depth) {
        const int  m     = m0 + thread%depth;
        const bool valid = m < shape.message;
        for (int i = thread/depth; i < DSPINE_TILE_WIDTH; i += DSPINE_SCORE_THREADS/depth) {
            const int64_t at = (int64_t) min(i0 + i, shape.n_embd - 1)*shape.message + m;
            w[thread%depth][i] = valid ? ggml_cuda_cast<float>(((const T *) args.write)[at]) : 0.0f;
        }
        for (int pair = thread/depth; pair < DSPINE_TILE_PAIRS; pair += DSPINE_SCORE_THREADS/depth) {
            const int64_t at = ((int64_t) position0*DSPINE_MAX_TOP_K + pair)*shape.message + m;
            messages[thread%depth][pair] = valid ? ggml_cuda_cast<float>(((const T *) args.messages)[at]) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < depth; ++d) {
#pragma unroll
            for (int p = 0; p < DSPINE_TILE_POSITIONS; ++p) {
                const float message = messages[d][DSPINE_MAX_TOP_K*p + k];
#pragma unroll
                for (int i = 0; i < n_i; ++i) {
                    sum[i][p] += w[d][i_own + i_stride*i]*message;
                }
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int p = 0; p < DSPINE_TILE_POSITIONS; ++p) {
        const int     position = position0 + p;
        const bool    valid    = position < shape.n_positions;
        const float * h        = args.h[valid ? shape.row_of(position) : 0];
#pragma unroll
        for (int i = 0; i < n_i; ++i) {
            const int at = i_own + i_stride*i;
            refined[DSPINE_MAX_TOP_K*p + k][at] = valid && i0 + at < shape.n_embd ? h[i0 + at] + sum[i][p] : 0.0f;
        }
    }
}

// Elements i to i + 3 of a row of n; zeros beyond it. i is a multiple of four; so is n where rows are aligned.
static __device__ __forceinline__ float4 dspine_load4(const float * row, const int i, const int n) {
    if (n%4 == 0) {
        return i < n ? *(const float4 *) (row + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    return make_float4(
        i + 0 < n ? row[i + 0] : 0.0f, i + 1 < n ? row[i + 1] : 0.0f,
        i + 2 < n ? row[i + 2] : 0.0f, i + 3 < n ? row[i + 3] : 0.0f);
}

static __device__ __forceinline__ float dspine_dot4(const float4 a, const float4 b) {
    return (a.x*b.x + a.y*b.y) + (a.z*b.z + a.w*b.w);
}

// The tile's part of a position's scores and of its squared lengths. A warp has the position, and a lane the
// predecessors group and group + 8 with every fourth candidate: eight rows of shared memory at a time, in all banks.
static __device__ __forceinline__ void dspine_partial_scores(
        const dspine_cache_shape & shape, const dspine_score_args & args, const int i0, const int position, const dspine_refined & refined) {
    const int group = threadIdx.x/4;
    const int lane  = threadIdx.x%4;
    const float * heads = args.heads + (int64_t) position*shape.top_k*shape.n_embd;

    float dot[2][4] = {};
    float square[2] = {};
#pragma unroll 4
    for (int i = 0; i < DSPINE_TILE_WIDTH; i += 4) {
        const float4 norm = dspine_load4(args.norm, i0 + i, shape.n_embd);
        float4 head[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int64_t candidate = min(lane + 4*j, shape.top_k - 1);
            head[j] = dspine_load4(heads + candidate*shape.n_embd, i0 + i, shape.n_embd);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float4 x = *(const float4 *) &refined[DSPINE_MAX_TOP_K*threadIdx.y + group + 8*k][i];
            const float4 y = make_float4(x.x*norm.x, x.y*norm.y, x.z*norm.z, x.w*norm.w);
            square[k] += dspine_dot4(x, x);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                dot[k][j] += dspine_dot4(y, head[j]);
            }
        }
    }

    float * partial = args.partial + ((int64_t) position*gridDim.x + blockIdx.x)*shape.n_partial();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const int predecessor = group + 8*k;
        if (predecessor >= shape.top_k) {
            continue;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (lane + 4*j < shape.top_k) {
                partial[predecessor*shape.top_k + lane + 4*j] = dot[k][j];
            }
        }
        if (lane == 0) {
            partial[shape.top_k*shape.top_k + predecessor] = square[k];
        }
    }
}

// Sums of a tile of n_embd for four positions.
template <typename T, bool use_mma>
static __global__ void __launch_bounds__(DSPINE_SCORE_THREADS) dspine_score_kernel(
        const dspine_cache_shape shape, const dspine_score_args args) {
    __shared__ __align__(16) dspine_refined refined;
    const int i0        = DSPINE_TILE_WIDTH*blockIdx.x;
    const int position0 = DSPINE_TILE_POSITIONS*blockIdx.y;
    ggml_cuda_pdl_sync();

    if constexpr (use_mma) {
        dspine_refine_mma<T>(shape, args, i0, position0, refined);
    } else {
        dspine_refine_fma<T>(shape, args, i0, position0, refined);
    }
    __syncthreads();
    const int position = position0 + threadIdx.y;
    if (position < shape.n_positions) {
        dspine_partial_scores(shape, args, i0, position, refined);
    }
}

struct dspine_finish_args {
    const char  * candidates; // I32 [top_k, rows]
    size_t        candidates_stride;
    dspine_rows   logits;     // [n_vocab, rows]
    const float * partial;    // of dspine_score_kernel
    float       * dst;        // [n_embd, rows]
    int           tiles;
    float         eps;
};

// The packed row: ids, scores, zeros. One thread block per row, one thread per score.
static __global__ void __launch_bounds__(DSPINE_FINISH_THREADS) dspine_finish_kernel(
        const dspine_cache_shape shape, const dspine_finish_args args) {
    ggml_cuda_pdl_sync();

    const int  row    = blockIdx.x;
    const int  block  = row/shape.block_rows;
    const int  t      = row%shape.block_rows;
    const int  thread = threadIdx.x;
    const bool scored = t > 0 && t < shape.scored;

    float * packed = args.dst + (int64_t) row*shape.n_embd;
    for (int i = thread + (scored ? shape.n_partial() : 0); i < shape.n_embd; i += DSPINE_FINISH_THREADS) {
        packed[i] = 0.0f;
    }
    if (!scored) {
        return;
    }
    const int32_t * ids = (const int32_t *) (args.candidates + row*args.candidates_stride);
    if (thread < shape.top_k) {
        packed[thread] = ids[thread];
    }
    if (thread >= shape.top_k*shape.top_k) {
        return;
    }
    float * score = packed + shape.top_k + thread;
    if (t == 1) {
        *score = args.logits[row][ids[thread%shape.top_k]];
        return;
    }
    const int64_t position = (int64_t) block*(shape.scored - 2) + t - 2;
    const float * dot    = args.partial + position*args.tiles*shape.n_partial() + thread;
    const float * square = dot - thread + shape.top_k*shape.top_k + thread/shape.top_k;
    float dots    = 0.0f;
    float squares = 0.0f;
#pragma unroll 8
    for (int tile = 0; tile < args.tiles; ++tile) {
        dots    += dot   [tile*shape.n_partial()];
        squares += square[tile*shape.n_partial()];
    }
    *score = dots*rsqrtf(squares/shape.n_embd + args.eps);
}

// Enqueues what leaves in `partial` the sums of every position.
template <typename T>
static void dspine_cache_scores(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const dspine_cache_shape & shape, float * partial) {
    const ggml_tensor * head       = dst->src[0];
    const ggml_tensor * write      = dst->src[2];
    const ggml_tensor * gated      = dst->src[4];
    const ggml_tensor * candidates = dst->src[7];
    const int64_t       per_block  = shape.scored - 2;
    const int64_t       padded     = (int64_t) shape.groups()*DSPINE_TILE_POSITIONS;
    cudaStream_t        stream     = ctx.stream();

    ggml_cuda_pool_alloc<float> heads(ctx.pool(), (size_t) shape.n_embd*shape.top_k*shape.n_positions);
    ggml_cuda_pool_alloc<T>     messages(ctx.pool(), (size_t) shape.message*DSPINE_MAX_TOP_K*padded);

    const size_t row_size = shape.n_embd*sizeof(float);
    get_rows_cuda(head->data, head->type, (const int32_t *) ((const char *) candidates->data + 2*candidates->nb[1]),
        heads.get(), GGML_TYPE_F32, shape.n_embd, head->nb[1], 0, 0,
        shape.top_k, per_block, shape.n_positions/per_block,
        sizeof(int32_t), candidates->nb[1], shape.block_rows*candidates->nb[1],
        row_size, shape.top_k*row_size, per_block*shape.top_k*row_size, stream);

    dspine_message_args sent = {};
    sent.h        = dspine_rows_of(dst->src[3]);
    sent.receiver = { (const char *) gated->data + gated->nb[2], gated->nb[1] };
    sent.value    = dspine_rows_of(dst->src[5]);
    sent.gate     = dspine_rows_of(dst->src[6]);
    sent.messages = messages.get();
    ggml_cuda_kernel_launch(dspine_message_kernel<T>,
        ggml_cuda_kernel_launch_params(dim3(padded, DSPINE_MAX_TOP_K), dim3(DSPINE_MESSAGE_THREADS), 0, stream), shape, sent);

    dspine_score_args args = {};
    args.h        = sent.h;
    args.write    = write->data;
    args.messages = messages.get();
    args.heads    = heads.get();
    args.norm     = (const float *) dst->src[1]->data;
    args.partial  = partial;
    GGML_ASSERT((uintptr_t) args.norm % sizeof(float4) == 0);
    const ggml_cuda_kernel_launch_params params(
        dim3(shape.tiles(), shape.groups()), dim3(WARP_SIZE, DSPINE_TILE_POSITIONS), 0, stream);
    if constexpr (!std::is_same_v<T, float>) {
        if (dspine_can_use_mma(write->type, shape.message, ggml_cuda_info().devices[ctx.device].cc)) {
            ggml_cuda_kernel_launch(dspine_score_kernel<T, true>, params, shape, args);
            return;
        }
    }
    ggml_cuda_kernel_launch(dspine_score_kernel<T, false>, params, shape, args);
}

template <typename T>
static void dspine_cache(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * candidates = dst->src[7];
    const int n_blocks = ggml_get_op_params_i32(dst, 0);

    dspine_cache_shape shape = {};
    shape.n_embd      = dst->ne[0];
    shape.message     = dst->src[2]->ne[0];
    shape.top_k       = candidates->ne[0];
    shape.block_rows  = dst->ne[1]/n_blocks;
    shape.scored      = ggml_get_op_params_i32(dst, 1);
    shape.n_positions = std::max(shape.scored - 2, 0)*n_blocks;

    ggml_cuda_pool_alloc<float> partial(ctx.pool());
    if (shape.n_positions > 0) {
        partial.alloc((size_t) shape.n_partial()*shape.tiles()*shape.n_positions);
        dspine_cache_scores<T>(ctx, dst, shape, partial.get());
    }

    dspine_finish_args args = {};
    args.candidates        = (const char *) candidates->data;
    args.candidates_stride = candidates->nb[1];
    args.logits            = dspine_rows_of(dst->src[8]);
    args.partial           = partial.get();
    args.dst               = (float *) dst->data;
    args.tiles             = shape.tiles();
    args.eps               = ggml_get_op_params_f32(dst, 2);
    ggml_cuda_kernel_launch(dspine_finish_kernel,
        ggml_cuda_kernel_launch_params(dim3(dst->ne[1]), dim3(DSPINE_FINISH_THREADS), 0, ctx.stream()), shape, args);
}
