// Where the output projection goes when its rows must be gathered: never into a buffer that cannot.
#include "dspine-pair.h"

#include "check.h"

#include <utility>
#include <vector>

// devices and buffer types are compared, never used
static ggml_backend_dev_t         dev(uintptr_t i)  { return reinterpret_cast<ggml_backend_dev_t>(i); }
static ggml_backend_buffer_type_t buft(uintptr_t i) { return reinterpret_cast<ggml_backend_buffer_type_t>(i); }

int main() {
    enum : uintptr_t { CPU = 1, GPU = 2, REPACK = 11, PLAIN = 12, VRAM = 21, SPLIT = 22 };
    const std::vector<std::pair<ggml_backend_dev_t, ggml_backend_buffer_type_t>> list = {
        { dev(GPU), buft(SPLIT) }, { dev(GPU), buft(VRAM) }, { dev(CPU), buft(REPACK) }, { dev(CPU), buft(PLAIN) },
    };
    auto gathers = [](ggml_backend_dev_t, ggml_backend_buffer_type_t b) {
        return b == buft(PLAIN) || b == buft(VRAM);
    };
    auto nothing_gathers = [](ggml_backend_dev_t, ggml_backend_buffer_type_t) { return false; };

    CHECK(dspine_head_buft(buft(REPACK), list, gathers) == buft(PLAIN)); // the same device, rows readable
    CHECK(dspine_head_buft(buft(SPLIT),  list, gathers) == buft(VRAM));  // not moved off the GPU
    CHECK(dspine_head_buft(buft(VRAM),   list, gathers) == buft(VRAM));
    CHECK(dspine_head_buft(buft(PLAIN),  list, gathers) == buft(PLAIN));
    CHECK(dspine_head_buft(buft(REPACK), list, nothing_gathers) == buft(REPACK));
    CHECK(dspine_head_buft(buft(99),     list, gathers) == buft(99));    // chosen outside the list: left alone
    return 0;
}
