// Moves of tokens within slots of a key/value cache on CPUs: the accepted paths of trees. Called by way of
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

// Copy `moved` tokens to other places of their slots, one after another. `moves` has their slots, then their places, then
// the places they go to. Within a slot places ascend, and none lies before the one it goes to, so nothing is overwritten
// before it is read.
extern "C" void move_places(const Held* tensors, int64_t count, const int64_t* moves, int64_t moved) {
    const int64_t *slots = moves, *from = moves + moved, *to = moves + 2 * moved;
    for (int pass = 0; pass < 2; ++pass) {  // the first asks for the lines, which lie far apart, all at once
        for (int64_t t = 0; t < count; ++t) {
            const Held& held = tensors[t];
            for (int64_t h = 0; h < held.heads; ++h) {
                for (int64_t i = 0; i < moved; ++i) {
                    char* row = reinterpret_cast<char*>(held.data) + slots[i] * held.slot + h * held.head;
                    const char* source = row + from[i] * held.place;
                    if (pass) {
                        std::memmove(row + to[i] * held.place, source, held.place);
                    } else {
                        for (int64_t b = 0; b < held.place; b += LINE) __builtin_prefetch(source + b);
                    }
                }
            }
        }
    }
}
