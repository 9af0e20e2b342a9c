// BF16 products on the tiles of AMX: those of the injection are half of what a DSpine round adds to its backbone on such a
// CPU, and ggml has tiles for quantized weights alone. In front of llamafile_sgemm, which CMakeLists.txt renames to
// the function declared below; what is not for the tiles goes there. It takes BF16 products of two columns and more, those
// of a BF16 target as well, which upstream rounds by the number of columns likewise.
#include "dspine-amx.h"

#include "ggml-cpu-impl.h"

#ifdef GGML_USE_LLAMAFILE
#include "llamafile/sgemm.h"

extern "C" bool dspine_portable_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
        const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc, int Atype, int Btype, int Ctype);
#endif

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t SIDE    = DSPINE_TILE_SIDE;
constexpr int64_t DEPTH   = DSPINE_TILE_DEPTH;
constexpr int64_t PANEL   = 512 * 1024; // bytes of columns that are packed at a time: a part of a core's own cache
constexpr int64_t AHEAD   = 256; // values of a row that are fetched before they are used: rows are far apart in memory

void configure_tiles() {
    struct alignas(64) {
        uint8_t  palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = { 64, 64, 64, 64, 64, 64, 64, 64 };
        uint8_t  rows[16]      = { 16, 16, 16, 16, 16, 16, 16, 16 };
    } config;
    __asm__ volatile("" : : "r"(&config) : "memory"); // gcc 12 takes the instruction to read 8 of the 64 bytes
    _tile_loadconfig(&config);
}

// SIDE columns of B [.., k], `n` of them real
void pack_columns(const uint16_t * b, int64_t ldb, int64_t n, int64_t k, uint32_t * packed) {
    const __mmask16 real    = (__mmask16) ((1u << n) - 1);
    const __m512i   offsets = _mm512_mullo_epi32(_mm512_set1_epi32((int) ldb * 2),
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (int64_t pair = 0; pair < k / 2; ++pair) {
        const __m512i column = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), real, offsets, b + 2 * pair, 1);
        _mm512_storeu_si512(packed + pair * SIDE, column);
    }
}

// Products of two tiles of rows and two of columns, or of one: (row, column) (0, 0) in tile 0, (1, 0) in 1, (0, 1) in 2,
// (1, 1) in 3.
template <bool two_rows, bool two_columns>
void accumulate(const uint16_t * a, int64_t lda, const uint32_t * b, int64_t k) {
    __asm__ volatile("" : : : "memory"); // gcc 12 does not know that loads of tiles read memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < k; at += DEPTH) {
        for (int64_t r = 0; r < (two_rows ? 2 : 1) * SIDE; ++r) {
            _mm_prefetch((const char *) (a + r * lda + at + AHEAD), _MM_HINT_T0);
        }
        _tile_loadd(4, a + at, lda * 2);
        _tile_loadd(6, b + at / 2 * SIDE, SIDE * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (two_rows) {
            _tile_loadd(5, a + SIDE * lda + at, lda * 2);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (two_columns) {
            _tile_loadd(7, b + (k + at) / 2 * SIDE, SIDE * 4);
            _tile_dpbf16ps(2, 4, 7);
            if (two_rows) {
                _tile_dpbf16ps(3, 5, 7);
            }
        }
    }
}

void accumulate(const uint16_t * a, int64_t lda, const uint32_t * b, int64_t k, bool two_rows, bool two_columns) {
    if (two_columns) {
        (two_rows ? accumulate<true, true> : accumulate<false, true>)(a, lda, b, k);
    } else {
        (two_rows ? accumulate<true, false> : accumulate<false, false>)(a, lda, b, k);
    }
}

// a tile stores where a constant says
void store_tile(int tile, float * out, int64_t ldo) {
    switch (tile) {
        case 0: _tile_stored(0, out, ldo * 4); break;
        case 1: _tile_stored(1, out, ldo * 4); break;
        case 2: _tile_stored(2, out, ldo * 4); break;
        case 3: _tile_stored(3, out, ldo * 4); break;
    }
}

// `n` columns of a tile, as columns of C
void store_columns(int tile, float * c, int64_t ldc, int64_t n) {
    alignas(64) float results[SIDE * SIDE];
    store_tile(tile, results, SIDE);
    const __m512i rows = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    for (int64_t j = 0; j < n; ++j) {
        const __m512 column = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, rows, results + j, sizeof(float));
        _mm512_storeu_ps(c + j * ldc, column);
    }
}

// Products of rows [m, k] and n packed columns, two tiles by two; store(tile, i, j) takes results [i.., j..] out of a tile.
template <typename Store>
void multiply_packed(const uint16_t * a, int64_t lda, int64_t m, const uint32_t * packed, int64_t n, int64_t k, const Store & store) {
    for (int64_t i = 0; i < m; i += 2 * SIDE) {
        for (int64_t j = 0; j < n; j += 2 * SIDE) {
            const bool two_rows = i + SIDE < m, two_columns = j + SIDE < n;
            accumulate(a + i * lda, lda, packed + j * k / 2, k, two_rows, two_columns);
            for (int tile = 0; tile < 4; ++tile) {
                const int64_t down = tile % 2, right = tile / 2;
                if ((!down || two_rows) && (!right || two_columns)) {
                    store(tile, i + down * SIDE, j + right * SIDE);
                }
            }
        }
    }
}

// C = A B^T of m rows and n columns, which are packed here
void multiply_panel(int64_t m, int64_t n, int64_t k, const uint16_t * a, int64_t lda, const uint16_t * b, int64_t ldb,
        float * c, int64_t ldc, std::vector<uint32_t> & packed) {
    packed.resize(std::max(packed.size(), (size_t) ((n + SIDE - 1) / SIDE * SIDE * k / 2)));
    for (int64_t j = 0; j < n; j += SIDE) {
        pack_columns(b + j * ldb, ldb, std::min(SIDE, n - j), k, packed.data() + j * k / 2);
    }
    multiply_packed(a, lda, m, packed.data(), n, k, [&](int tile, int64_t i, int64_t j) {
        store_columns(tile, c + j * ldc + i, ldc, std::min(SIDE, n - j));
    });
}

// This thread's part of C = A B^T. Threads share the rows; where there are more threads than tiles of rows, groups of
// threads share the columns first.
void multiply_share(const ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const uint16_t * a, int64_t lda,
        const uint16_t * b, int64_t ldb, float * c, int64_t ldc) {
    static thread_local std::vector<uint32_t> packed;
    const int64_t tiles   = m / SIDE;
    const int64_t rights  = (n + 2 * SIDE - 1) / (2 * SIDE); // pairs of tiles of columns
    const int64_t groups  = std::clamp<int64_t>(params->nth / tiles, 1, rights);
    const int64_t group   = params->ith % groups, member = params->ith / groups;
    const int64_t members = (params->nth - group + groups - 1) / groups;
    const int64_t begin   = tiles * member / members, end = tiles * (member + 1) / members;
    const int64_t first   = rights * group / groups * 2 * SIDE, last = std::min(n, rights * (group + 1) / groups * 2 * SIDE);
    const int64_t columns = std::max<int64_t>(PANEL / (k * 2) / (2 * SIDE), 1) * 2 * SIDE;
    if (begin == end) {
        return;
    }
    configure_tiles();
    for (int64_t at = first; at < last; at += columns) {
        multiply_panel((end - begin) * SIDE, std::min(columns, last - at), k, a + begin * SIDE * lda, lda, b + at * ldb, ldb,
                c + at * ldc + begin * SIDE, ldc, packed);
    }
    _tile_release();
}

} // namespace

// a process asks once before it may use tiles
bool dspine_has_tiles() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
    return allowed;
}

void dspine_tiles_multiply(const uint16_t * a, int64_t lda, int64_t m, const uint32_t * packed, int64_t n, int64_t k, float * out, int64_t ldo) {
    configure_tiles();
    multiply_packed(a, lda, m, packed, n, k, [&](int tile, int64_t i, int64_t j) {
        store_tile(tile, out + i * ldo + j, ldo);
    });
    _tile_release();
}

#ifdef GGML_USE_LLAMAFILE
bool llamafile_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
        const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc, int Atype, int Btype, int Ctype) {
    const bool bf16 = Atype == GGML_TYPE_BF16 && Btype == GGML_TYPE_BF16 && Ctype == GGML_TYPE_F32;
    // one column is a vector's business; offsets of 16 columns are 32-bit numbers
    if (!bf16 || n < 2 || m < SIDE || m % SIDE || k % DEPTH || ldb > (1 << 24) || !dspine_has_tiles()) {
        return dspine_portable_sgemm(params, m, n, k, A, lda, B, ldb, C, ldc, Atype, Btype, Ctype);
    }
    multiply_share(params, m, n, k, (const uint16_t *) A, lda, (const uint16_t *) B, ldb, (float *) C, ldc);
    return true;
}
#endif

#else

bool dspine_has_tiles() {
    return false;
}

void dspine_tiles_multiply(const uint16_t *, int64_t, int64_t, const uint32_t *, int64_t, int64_t, float *, int64_t) {
    GGML_ABORT("no tiles in this build");
}

#ifdef GGML_USE_LLAMAFILE
bool llamafile_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k,
        const void * A, int64_t lda, const void * B, int64_t ldb, void * C, int64_t ldc, int Atype, int Btype, int Ctype) {
    return dspine_portable_sgemm(params, m, n, k, A, lda, B, ldb, C, ldc, Atype, Btype, Ctype);
}
#endif

#endif
