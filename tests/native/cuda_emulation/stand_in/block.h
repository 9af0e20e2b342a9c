// One thread block after the other, on the CPU: each thread of a block is a fiber that runs until it waits for its warp
// or for its block. Between two such points the threads run one after the other in an order that `order` chooses, the
// blocks likewise: a missing barrier, or shared memory read before it is written, shows as a result that depends on it.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define WARP_SIZE 32

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// what a kernel sees of its place
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

// 0: ascending, 1: descending, else the seed of a shuffle before every turn
inline int order = 0;

inline void fail(const char * what) {
    std::fprintf(stderr, "emulation: %s (block %u, %u, thread %u, %u)\n", what, blockIdx.x, blockIdx.y, threadIdx.x, threadIdx.y);
    std::exit(3);
}

enum class state { ready, at_block, at_warp, done };

struct fiber {
    ucontext_t        context;
    std::vector<char> stack = std::vector<char>(1 << 17);
    dim3              index;
    state             now;
    int               turn;         // warp operations begun so far
    char              slot[2][64];  // what it gives to its warp, by the parity of `turn`
};

struct block {
    std::vector<fiber>    fibers;
    std::function<void()> kernel;
    ucontext_t            scheduler;
    size_t                current = 0;
    std::mt19937          random;

    void wait(state why) {
        fiber & f = fibers[current];
        f.now = why;
        swapcontext(&f.context, &scheduler);
    }

    static void enter();
    void resume(size_t i);
    bool release();
    void run(const dim3 & dims);
    void arrange(std::vector<size_t> & turns);
};

inline block & running() {
    static block instance;
    return instance;
}

inline void block::enter() {
    running().kernel();
    running().wait(state::done);
}

inline void block::resume(size_t i) {
    current   = i;
    threadIdx = fibers[i].index;
    swapcontext(&scheduler, &fibers[i].context);
}

// lets the threads go on that have all arrived where they wait
inline bool block::release() {
    bool any = false;
    for (size_t first = 0; first < fibers.size(); first += WARP_SIZE) {
        const auto begin = fibers.begin() + first;
        const auto end   = begin + std::min<size_t>(WARP_SIZE, fibers.size() - first);
        if (std::all_of(begin, end, [&](const fiber & f) { return f.now == state::at_warp && f.turn == begin->turn; })) {
            std::for_each(begin, end, [](fiber & f) { f.now = state::ready; });
            any = true;
        }
    }
    if (std::all_of(fibers.begin(), fibers.end(), [](const fiber & f) { return f.now == state::at_block; })) {
        std::for_each(fibers.begin(), fibers.end(), [](fiber & f) { f.now = state::ready; });
        any = true;
    }
    return any;
}

inline void block::arrange(std::vector<size_t> & turns) {
    if (order == 1) {
        std::sort(turns.rbegin(), turns.rend());
    } else if (order > 1) {
        std::shuffle(turns.begin(), turns.end(), random);
    }
}

inline void block::run(const dim3 & dims) {
    fibers.resize((size_t) dims.x*dims.y*dims.z);
    std::vector<size_t> turns(fibers.size());
    std::iota(turns.begin(), turns.end(), 0);
    for (size_t i = 0; i < fibers.size(); ++i) {
        fiber & f = fibers[i];
        f.index = dim3(i%dims.x, i/dims.x%dims.y, i/dims.x/dims.y);
        f.now   = state::ready;
        f.turn  = 0;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp   = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link          = nullptr;
        makecontext(&f.context, enter, 0);
    }
    do {
        arrange(turns);
        for (size_t i : turns) {
            if (fibers[i].now == state::ready) {
                resume(i);
            }
        }
    } while (release());
    if (!std::all_of(fibers.begin(), fibers.end(), [](const fiber & f) { return f.now == state::done; })) {
        fail("threads of a block wait for different things");
    }
}

// Gives `mine` to the warp and returns what lane `lane` gave, by value, for each lane that `take` asks for.
template <typename T, typename Take>
auto exchange(const T & mine, Take take) {
    static_assert(sizeof(T) <= sizeof(fiber::slot[0]), "a slot is too small");
    block & b      = running();
    fiber & f      = b.fibers[b.current];
    const int half = f.turn++ % 2; // nobody is more than one operation ahead
    std::memcpy(f.slot[half], &mine, sizeof(T));
    b.wait(state::at_warp);
    const size_t warp = b.current/WARP_SIZE*WARP_SIZE;
    return take([&](int lane) {
        T value;
        std::memcpy(&value, b.fibers[warp + lane].slot[half], sizeof(T));
        return value;
    });
}

inline int lane() {
    return running().current%WARP_SIZE;
}

template <typename Kernel, typename... Args>
void launch(Kernel kernel, const dim3 & grid, const dim3 & dims, Args... args) {
    block & b = running();
    b.kernel = [&] { kernel(args...); };
    b.random.seed(order);
    gridDim  = grid;
    blockDim = dims;
    std::vector<size_t> blocks((size_t) grid.x*grid.y*grid.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    b.arrange(blocks);
    for (size_t i : blocks) {
        blockIdx = dim3(i%grid.x, i/grid.x%grid.y, i/grid.x/grid.y);
        b.run(dims);
    }
}

} // namespace emulation
