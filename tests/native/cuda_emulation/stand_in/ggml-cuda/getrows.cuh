// Stands in for upstream's header of this name; see common.cuh. Only to F32.
#pragma once

#include "common.cuh"

inline void get_rows_cuda(
        const void * src0, ggml_type src0_type, const int32_t * src1, void * dst, ggml_type dst_type,
        int64_t ne00, size_t nb01, size_t nb02, size_t nb03,
        int64_t ne10, int64_t ne11, int64_t ne12, size_t nb10, size_t nb11, size_t nb12,
        size_t nb1, size_t nb2, size_t nb3, cudaStream_t) {
    GGML_ASSERT(dst_type == GGML_TYPE_F32);
    const auto to_float = ggml_get_type_traits(src0_type)->to_float;
    for (int64_t i = 0; i < ne10*ne11*ne12; ++i) {
        const int64_t i10 = i%ne10, i11 = i/ne10%ne11, i12 = i/ne10/ne11;
        const int32_t id  = *(const int32_t *) ((const char *) src1 + i10*nb10 + i11*nb11 + i12*nb12);
        const char * from = (const char *) src0 + id*nb01 + i11*nb02 + i12*nb03;
        char       * to   = (char *) dst + i10*nb1 + i11*nb2 + i12*nb3;
        if (to_float) {
            to_float(from, (float *) to, ne00);
        } else {
            std::memcpy(to, from, ne00*sizeof(float));
        }
    }
}
