// The search for the scale and minimum of a sub-block is a chain of sums whose order fixes the
// result, so one sub-block cannot be spread over lanes. A super-block has eight sub-blocks: each
// lane runs the whole scalar search for one of them, in the same order and with the same rounding.
// Functions are compiled for avx2 without fma: a fused multiply-add would round differently.
#include "dspine-quant.h"

#include "ggml.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define DSPINE_AVX2 __attribute__((target("avx2")))
#define DSPINE_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace {

constexpr int SUB   = QK_K / 32; // sub-blocks of a super-block, one a lane
constexpr int WIDTH = 32;        // values of a sub-block
constexpr int NMAX  = 15;        // largest 4-bit value
constexpr int STEPS = 20;        // tried scales: (NMAX - 1 + 0.1 * step) / range

// adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa
constexpr float ROUNDER = 12582912.f;

int nearest_int(float value) {
    const float shifted = value + ROUNDER;
    int bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    return (bits & 0x007fffff) - 0x00400000;
}

// nearest integers of eight values, clamped to 0..NMAX
DSPINE_AVX2_INLINE __m256i levels(__m256 values) {
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(values, _mm256_set1_ps(ROUNDER)));
    const __m256i near = _mm256_sub_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x00400000));
    return _mm256_max_epi32(_mm256_setzero_si256(), _mm256_min_epi32(_mm256_set1_epi32(NMAX), near));
}

// Eight sub-blocks of one super-block; element i of every vector array is value i of each sub-block.
struct sub_blocks {
    __m256 x[WIDTH];
    __m256 weight[WIDTH];

    // the result: scales, minima (as negative offsets), and how the chosen levels were made
    __m256 scale;
    __m256 min;
    __m256 level_scale;
    __m256 level_min;
};

DSPINE_AVX2_INLINE void transpose(const float * x, __m256 * out) {
    for (int part = 0; part < WIDTH; part += 8) {
        __m256 r[8];
        for (int j = 0; j < 8; ++j) {
            r[j] = _mm256_loadu_ps(x + WIDTH * j + part);
        }
        __m256 pair[8];
        for (int j = 0; j < 8; j += 2) {
            pair[j]     = _mm256_unpacklo_ps(r[j], r[j + 1]);
            pair[j + 1] = _mm256_unpackhi_ps(r[j], r[j + 1]);
        }
        __m256 quad[8];
        for (int j = 0; j < 8; j += 4) {
            quad[j]     = _mm256_shuffle_ps(pair[j],     pair[j + 2], 0x44);
            quad[j + 1] = _mm256_shuffle_ps(pair[j],     pair[j + 2], 0xEE);
            quad[j + 2] = _mm256_shuffle_ps(pair[j + 1], pair[j + 3], 0x44);
            quad[j + 3] = _mm256_shuffle_ps(pair[j + 1], pair[j + 3], 0xEE);
        }
        for (int j = 0; j < 4; ++j) {
            out[part + j]     = _mm256_permute2f128_ps(quad[j], quad[j + 4], 0x20);
            out[part + j + 4] = _mm256_permute2f128_ps(quad[j], quad[j + 4], 0x31);
        }
    }
}

// importance of a value: the sub-block's root mean square plus its own magnitude
DSPINE_AVX2_INLINE void weigh(sub_blocks & b) {
    __m256 sum = _mm256_setzero_ps();
    for (int i = 0; i < WIDTH; ++i) {
        sum = _mm256_add_ps(sum, _mm256_mul_ps(b.x[i], b.x[i]));
    }
    const __m256 rms  = _mm256_sqrt_ps(_mm256_div_ps(sum, _mm256_set1_ps(WIDTH)));
    const __m256 sign = _mm256_set1_ps(-0.f);
    for (int i = 0; i < WIDTH; ++i) {
        b.weight[i] = _mm256_add_ps(rms, _mm256_andnot_ps(sign, b.x[i]));
    }
}

// sum of weight * (scale * level + min - x)^2
DSPINE_AVX2_INLINE __m256 error_of(const sub_blocks & b, const __m256 * level, __m256 scale, __m256 min) {
    __m256 error = _mm256_setzero_ps();
    for (int i = 0; i < WIDTH; ++i) {
        const __m256 diff = _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(scale, level[i]), min), b.x[i]);
        error = _mm256_add_ps(error, _mm256_mul_ps(b.weight[i], _mm256_mul_ps(diff, diff)));
    }
    return error;
}

DSPINE_AVX2 void search(sub_blocks & b) {
    const __m256 zero = _mm256_setzero_ps();
    __m256 min   = b.x[0];
    __m256 max   = b.x[0];
    __m256 sum_w = b.weight[0];
    __m256 sum_x = _mm256_mul_ps(b.weight[0], b.x[0]);
    for (int i = 1; i < WIDTH; ++i) {
        min   = _mm256_min_ps(b.x[i], min);
        max   = _mm256_max_ps(b.x[i], max);
        sum_w = _mm256_add_ps(sum_w, b.weight[i]);
        sum_x = _mm256_add_ps(sum_x, _mm256_mul_ps(b.weight[i], b.x[i]));
    }
    min = _mm256_min_ps(zero, min);
    const __m256 flat      = _mm256_cmp_ps(max, min, _CMP_EQ_OQ); // nothing to search: scale 0
    const __m256 flat_min  = min;

    __m256 level[WIDTH];
    __m256 inverse = _mm256_div_ps(_mm256_set1_ps(NMAX), _mm256_sub_ps(max, min));
    __m256 scale   = _mm256_div_ps(_mm256_set1_ps(1.f), inverse);
    for (int i = 0; i < WIDTH; ++i) {
        level[i] = _mm256_cvtepi32_ps(levels(_mm256_mul_ps(inverse, _mm256_sub_ps(b.x[i], min))));
    }
    __m256 best = error_of(b, level, scale, min);
    b.level_scale = inverse;
    b.level_min   = min;

    for (int step = 0; step <= STEPS; ++step) {
        const float wanted = -1.f + 0.1f * (float) step + (float) NMAX;
        inverse = _mm256_div_ps(_mm256_set1_ps(wanted), _mm256_sub_ps(max, min));
        __m256 sum_l = zero, sum_l2 = zero, sum_xl = zero;
        for (int i = 0; i < WIDTH; ++i) {
            level[i] = _mm256_cvtepi32_ps(levels(_mm256_mul_ps(inverse, _mm256_sub_ps(b.x[i], min))));
            const __m256 wl = _mm256_mul_ps(b.weight[i], level[i]);
            sum_l  = _mm256_add_ps(sum_l,  wl);
            sum_l2 = _mm256_add_ps(sum_l2, _mm256_mul_ps(wl, level[i]));
            sum_xl = _mm256_add_ps(sum_xl, _mm256_mul_ps(wl, b.x[i]));
        }
        const __m256 det = _mm256_sub_ps(_mm256_mul_ps(sum_w, sum_l2), _mm256_mul_ps(sum_l, sum_l));
        __m256 this_scale = _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(sum_w, sum_xl), _mm256_mul_ps(sum_x, sum_l)), det);
        __m256 this_min   = _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(sum_l2, sum_x), _mm256_mul_ps(sum_l, sum_xl)), det);
        const __m256 above = _mm256_cmp_ps(this_min, zero, _CMP_GT_OQ);
        this_scale = _mm256_blendv_ps(this_scale, _mm256_div_ps(sum_xl, sum_l2), above);
        this_min   = _mm256_blendv_ps(this_min, zero, above);

        const __m256 error  = error_of(b, level, this_scale, this_min);
        const __m256 better = _mm256_and_ps(_mm256_cmp_ps(det, zero, _CMP_GT_OQ), _mm256_cmp_ps(error, best, _CMP_LT_OQ));
        b.level_scale = _mm256_blendv_ps(b.level_scale, inverse, better);
        b.level_min   = _mm256_blendv_ps(b.level_min, min, better);
        best  = _mm256_blendv_ps(best, error, better);
        scale = _mm256_blendv_ps(scale, this_scale, better);
        min   = _mm256_blendv_ps(min, this_min, better);
    }
    b.scale       = _mm256_andnot_ps(flat, scale);
    b.min         = _mm256_blendv_ps(min, flat_min, flat);
    b.level_scale = _mm256_andnot_ps(flat, b.level_scale); // levels of a flat sub-block are 0
    b.level_min   = _mm256_andnot_ps(flat, b.level_min);
}

// 6-bit scales and minima of eight sub-blocks in 12 bytes: the first four of each hold the upper bits of the others
void pack_scales(const float * scales, const float * mins, block_q4_K & y) {
    float max_scale = 0;
    float max_min   = 0;
    for (int j = 0; j < SUB; ++j) {
        max_scale = scales[j] > max_scale ? scales[j] : max_scale;
        max_min   = mins[j] > max_min ? mins[j] : max_min;
    }
    const float inv_scale = max_scale > 0 ? 63.f / max_scale : 0.f;
    const float inv_min   = max_min > 0 ? 63.f / max_min : 0.f;
    uint8_t s[SUB], m[SUB];
    for (int j = 0; j < SUB; ++j) {
        s[j] = std::min<uint8_t>(63, (uint8_t) nearest_int(inv_scale * scales[j]));
        m[j] = std::min<uint8_t>(63, (uint8_t) nearest_int(inv_min * mins[j]));
    }
    for (int j = 0; j < 4; ++j) {
        y.scales[j]     = s[j] | (s[j + 4] >> 4) << 6;
        y.scales[j + 4] = m[j] | (m[j + 4] >> 4) << 6;
        y.scales[j + 8] = (s[j + 4] & 15) | (m[j + 4] & 15) << 4;
    }
    y.d    = ggml_fp32_to_fp16(max_scale / 63.f);
    y.dmin = ggml_fp32_to_fp16(max_min / 63.f);
}

void unpack_scale(const block_q4_K & y, int j, int & scale, int & min) {
    const uint8_t * q = y.scales;
    scale = j < 4 ? q[j] & 63     : (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    min   = j < 4 ? q[j + 4] & 63 : (q[j + 4] >> 4) | (q[j] >> 6) << 4;
}

// levels of sub-block j; where its stored scale is 0 they are those of the search
DSPINE_AVX2 void final_levels(const float * x, const block_q4_K & y, int j, float level_scale, float level_min, int32_t * out) {
    int scale, min;
    unpack_scale(y, j, scale, min);
    const float d  = ggml_fp16_to_fp32(y.d) * (float) scale;
    const float dm = ggml_fp16_to_fp32(y.dmin) * (float) min;
    for (int i = 0; i < WIDTH; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const __m256 real = d != 0 ? _mm256_div_ps(_mm256_add_ps(v, _mm256_set1_ps(dm)), _mm256_set1_ps(d))
                                   : _mm256_mul_ps(_mm256_set1_ps(level_scale), _mm256_sub_ps(v, _mm256_set1_ps(level_min)));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), levels(real));
    }
}

DSPINE_AVX2 void quantize_block(const float * x, block_q4_K & y) {
    sub_blocks b;
    transpose(x, b.x);
    weigh(b);
    search(b);

    alignas(32) float scales[SUB], mins[SUB], level_scales[SUB], level_mins[SUB];
    _mm256_store_ps(scales, b.scale);
    _mm256_store_ps(mins, _mm256_xor_ps(b.min, _mm256_set1_ps(-0.f)));
    _mm256_store_ps(level_scales, b.level_scale);
    _mm256_store_ps(level_mins, b.level_min);
    pack_scales(scales, mins, y);

    int32_t levels_of[QK_K];
    for (int j = 0; j < SUB; ++j) {
        final_levels(x + WIDTH * j, y, j, level_scales[j], level_mins[j], levels_of + WIDTH * j);
    }
    uint8_t * q = y.qs;
    for (int j = 0; j < QK_K; j += 2 * WIDTH) {
        for (int i = 0; i < WIDTH; ++i) {
            *q++ = (uint8_t) (levels_of[j + i] | levels_of[j + WIDTH + i] << 4);
        }
    }
}

} // namespace

size_t dspine_quantize_q4_K(const float * src, void * dst, int64_t n_rows, int64_t n_per_row) {
    if (!__builtin_cpu_supports("avx2")) {
        return ggml_quantize_chunk(GGML_TYPE_Q4_K, src, dst, 0, n_rows, n_per_row, nullptr);
    }
    GGML_ASSERT(n_per_row % QK_K == 0);
    block_q4_K * blocks = static_cast<block_q4_K *>(dst);
    const int64_t n_blocks = n_rows * n_per_row / QK_K;
    for (int64_t i = 0; i < n_blocks; ++i) {
        quantize_block(src + i * QK_K, blocks[i]);
    }
    return (size_t) n_blocks * sizeof(block_q4_K);
}

#else

size_t dspine_quantize_q4_K(const float * src, void * dst, int64_t n_rows, int64_t n_per_row) {
    return ggml_quantize_chunk(GGML_TYPE_Q4_K, src, dst, 0, n_rows, n_per_row, nullptr);
}

#endif
