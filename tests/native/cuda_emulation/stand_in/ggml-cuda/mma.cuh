// Stands in for upstream's header of this name: a warp's 16 x 8 x 16 product with the operands where the PTX manual has
// them (mma.m16n8k16): group = lane / 4 and member = lane % 4 hold rows group and group + 8, columns by pairs.
#pragma once

#include "common.cuh"

namespace ggml_cuda_mma {

// I rows of J registers
template <int I_, int J_, typename T>
struct tile {
    static constexpr int I  = I_;
    static constexpr int J  = J_;
    static constexpr int ne = I*J/WARP_SIZE;
    T x[ne] = {};

    // of register l of a lane. A float is one column; of 16-bit types a register holds two.
    static int row(int lane, int l) {
        return lane/4 + (I == 8 ? 0 : 8*(std::is_same_v<T, float> ? l/2 : l%2));
    }

    static int column(int lane, int l) {
        return std::is_same_v<T, float> ? 2*(lane%4) + l%2 : lane%4 + 4*(I == 8 ? l : l/2);
    }

    static int get_i(int l) { return row(emulation::lane(), l); }
    static int get_j(int l) { return column(emulation::lane(), l); }
};

template <typename T>
void mma(tile<16, 8, float> & D, const tile<16, 8, T> & A, const tile<8, 8, T> & B) {
    struct operands { tile<16, 8, T> a; tile<8, 8, T> b; };
    emulation::exchange(operands { A, B }, [&](auto of) {
        T a[16][8], b[8][8];
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            const operands given = of(lane);
            for (int l = 0; l < A.ne; ++l) {
                a[A.row(lane, l)][A.column(lane, l)] = given.a.x[l];
            }
            for (int l = 0; l < B.ne; ++l) {
                b[B.row(lane, l)][B.column(lane, l)] = given.b.x[l];
            }
        }
        for (int l = 0; l < D.ne; ++l) {
            for (int k = 0; k < 8; ++k) {
                const T & u = a[D.get_i(l)][k];
                const T & v = b[D.get_j(l)][k];
                D.x[l] += (float) u.x*(float) v.x + (float) u.y*(float) v.y;
            }
        }
        return 0;
    });
}

} // namespace ggml_cuda_mma
