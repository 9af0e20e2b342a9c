// The CPU twins of the fused operations of dspine-ops.h. Called by ggml-cpu's dispatch (hook 0007).
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Whether the CPU backend computes `op`, a node of ggml_dspine_gate or ggml_dspine_cache: bridge weights of one type
// out of F32, F16, BF16, rows without gaps, a head whose rows can be dequantized, weights in plain host memory.
bool dspine_cpu_supports_op(const struct ggml_tensor * op);

// Bytes of the work buffer that all threads share.
size_t dspine_cpu_gate_work_size(const struct ggml_tensor * node);
size_t dspine_cpu_cache_work_size(const struct ggml_tensor * node, int n_tasks);

// Called by every thread of the pool. The result does not depend on their number.
void dspine_cpu_gate(const struct ggml_compute_params * params, struct ggml_tensor * dst);
void dspine_cpu_cache(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
