// Q4_K as ggml_quantize_chunk makes it, bit for bit, several times faster on x86 with AVX2.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// src: n_rows * n_per_row finite values, n_per_row a multiple of 256; dst: as many Q4_K blocks.
// Returns the bytes written. Without AVX2 this is ggml_quantize_chunk.
__attribute__((visibility("default")))
size_t dspine_quantize_q4_K(const float * src, void * dst, int64_t n_rows, int64_t n_per_row);

#ifdef __cplusplus
}
#endif
