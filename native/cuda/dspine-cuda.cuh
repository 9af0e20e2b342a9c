// The CUDA twins of the fused operations of native/src/dspine-ops.h. Called by ggml-cuda's dispatch (hook 0008).
#pragma once

#include "ggml-backend.h"

struct ggml_backend_cuda_context;

#ifdef DSPINE_CUDA_KERNELS

// Whether `dev` computes `op`, a node of ggml_dspine_gate or ggml_dspine_cache: bridge weights without gaps and of one
// type out of F32, F16, BF16, at most 16 candidates, a head whose rows GET_ROWS gathers there.
bool dspine_cuda_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op);

// Enqueues the kernels of `dst` on the context's stream. Neither waits for the device nor asks it for anything, so it
// can be captured in a CUDA graph; sums have a fixed order, so equal inputs give equal bytes.
void dspine_cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

#else

// HIP and MUSA compile ggml-cuda.cu as well, but not our kernels: the composed graph runs there
static inline bool dspine_cuda_supports_op(ggml_backend_dev_t, const ggml_tensor *) { return false; }
static inline void dspine_cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) { GGML_ABORT("not supported"); }

#endif
