// Moves of tokens within a slot of a key/value cache on CPUs: the accepted path of a tree. Called by way of
// place_kernel.py.

#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t LINE = 64;  // bytes that a processor reads at once

// One of the cache's tensors, bytes. As in place_kernel.py.
struct Held {
    int64_t data, slot, heads, head, place;  // address; from a slot to the next; count; from a head, a place to the next
};

}  // namespace

// Copy the tokens at `places` of a slot to start, start + 1, …. Places ascend, and none lies before the one it goes to,
// so nothing is overwritten before it is read.
extern "C" void move_places(const Held* tensors, int64_t count, int64_t slot, const int64_t* places, int64_t moved,
                            int64_t start) {
    for (int pass = 0; pass < 2; ++pass) {  // the first asks for the lines, which lie far apart, all at once
        for (int64_t t = 0; t < count; ++t) {
            const Held& held = tensors[t];
            for (int64_t h = 0; h < held.heads; ++h) {
                char* row = reinterpret_cast<char*>(held.data) + slot * held.slot + h * held.head;
                for (int64_t i = 0; i < moved; ++i) {
                    const char* from = row + places[i] * held.place;
                    if (pass) {
                        std::memmove(row + (start + i) * held.place, from, held.place);
                    } else {
                        for (int64_t b = 0; b < held.place; b += LINE) __builtin_prefetch(from + b);
                    }
                }
            }
        }
    }
}
