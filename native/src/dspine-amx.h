// BF16 products on the tiles of AMX, for the CPU twins. Column j of the right side is packed as tiles want it: 16
// columns at a time, [k / 2, 16] pairs of neighbouring values, groups of columns one after the other.
#pragma once

#include <cstdint>

constexpr int64_t DSPINE_TILE_SIDE  = 16; // rows and columns of a tile of results
constexpr int64_t DSPINE_TILE_DEPTH = 32; // values of a tile's row

// whether this build, the CPU and the system have tiles
bool dspine_has_tiles();

// out[i * ldo + j] = row i of `a` (BF16, [m, k], rows `lda` values apart) times packed column j. m and n are multiples of
// DSPINE_TILE_SIDE, k of DSPINE_TILE_DEPTH. For one thread.
void dspine_tiles_multiply(const uint16_t * a, int64_t lda, int64_t m, const uint32_t * packed, int64_t n, int64_t k, float * out, int64_t ldo);
