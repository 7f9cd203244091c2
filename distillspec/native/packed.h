// How weights are packed for products of some tokens.
//
// Weights have 16 bits: bfloat16 for models in bfloat16, float16 for those in float32. Those of a draft may be codes of 8
// bits, or of 7 where pairs of bfloat16 are multiplied, and a scale for each output behind all of them. They are packed so
// that a vector holds the same input (or two neighbouring ones) of LANES outputs. Sums are float32. Activations are bfloat16
// where the processor multiplies pairs of bfloat16 and the model is in it, else float32.

#pragma once

#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace {

template <typename T>
using Number = std::conditional_t<BY_PAIRS<T>, uint16_t, float>;  // of activations

constexpr float CENTRE = 64;      // the code of zero, of 7 bits
constexpr int16_t CODED = 0x4300;  // 128 as bfloat16

template <typename W>
constexpr int64_t LINE_OF = LINE / int64_t(sizeof(W));  // numbers of a line of the cache

template <typename T>
using Weight = std::conditional_t<sizeof(T) == 2, uint16_t, Half>;

// What is fetched, into the second cache, of blocks that are multiplied later: `step` numbers of each for a cache line that is
// multiplied.
template <typename W>
struct Ahead {
    const W* from;
    int64_t step;
};

// A function that is called keeps its sums in memory.
#define INLINED inline __attribute__((always_inline))

#if defined(__AVX512BF16__)
// Two inputs of LANES outputs. In bfloat16 128 to 255 follow one another: the bits of 128 with code c of 7 bits in the mantissa
// are 128 + c.
inline Pairs inputs(const uint16_t* weight) { return pairs(weight); }
inline Pairs inputs(const uint8_t* weight) { return widened(weight) | all_of_number(CODED); }
#endif

// A packed weight `[out, in]`.
template <typename W>
struct Packed {
    const W* held;
    int64_t out, in;

    const W* block(int64_t i) const { return held + i * in * LANES; }

    // What the sums of a token begin with: codes of 7 bits mean c − CENTRE, and 128 + c is what is multiplied.
    template <typename X>
    Vec first_sum(const X* x) const {
        if constexpr (std::is_same_v<W, uint8_t>) return all_of(-(128.0f + CENTRE) * sum_of(x, in));
        else return Vec{};
    }

    Vec scaled(Vec sums, int64_t output) const {
        if constexpr (sizeof(W) == 1) return sums * load((const float*)(held + out * in) + output);
        else return sums;
    }

    // Of `parts` that each ask for a share of what follows `blocks` blocks behind block i, what part `part` asks for.
    Ahead<W> ahead(int64_t i, int64_t blocks, int64_t part, int64_t parts) const {
        const int64_t step = (LINE_OF<W> + parts - 1) / parts;
        if (part * step >= LINE_OF<W>) return {block(i), 0};  // those before ask for all of it
        return {block(i + blocks) + part * step * (in * LANES / LINE_OF<W>), step};
    }
};

}  // namespace
