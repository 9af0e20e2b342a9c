// Where emulate.cpp computes: on_cpu.cpp or on_gpu.cu.
#pragma once

#include "ggml.h"

// Computes `out`, whose data and sources are in host memory, with the kernels for compute capability `cc` (860: 8.6).
// `order` chooses among ways that must give the same bytes.
void compute(ggml_tensor * out, int order, int cc);
