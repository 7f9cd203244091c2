// Products of some tokens with packed weights, shared by the threads of a parallel region.
//
// Weights have 16 bits: bfloat16 for models in bfloat16, float16 for those in float32. They are packed so that a vector
// holds the same input (or two neighbouring ones) of LANES outputs. Sums are float32. Activations are bfloat16 where the
// processor multiplies pairs of bfloat16 and the model is in it, else float32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

#if defined(__x86_64__) && !defined(__AVX2__)
#error "a processor with AVX2 is needed: without it torch is faster"
#endif

namespace {

#if defined(__AVX512BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif

constexpr int MOST = 8;    // tokens that one read of a weight serves
constexpr int BLOCKS = 4;  // of LANES outputs, that are computed together

template <typename T>
constexpr bool BY_PAIRS = UNITS && sizeof(T) == 2;

template <typename T>
using Number = std::conditional_t<BY_PAIRS<T>, uint16_t, float>;  // of activations

template <typename T>
using Weight = std::conditional_t<sizeof(T) == 2, uint16_t, Half>;

// sums[b][t] += block b of a packed weight times token t. `x` has `in` numbers a token.
template <int B, int N>
inline void multiply(const uint16_t* weight, int64_t in, const uint16_t* x, Vec (&sums)[B][N]) {
#if defined(__AVX512BF16__)
    for (int64_t k = 0; k < in; k += 2) {
        Pairs w[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) w[b] = pairs(weight + b * in * LANES + k * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
            int32_t both;
            std::memcpy(&both, x + t * in + k, sizeof both);
            const Pairs xs = _mm512_set1_epi32(both);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[b][t] = add_products(sums[b][t], xs, w[b]);
        }
    }
#endif
}

template <int B, int N, typename W>
inline void multiply(const W* weight, int64_t in, const float* x, Vec (&sums)[B][N]) {
    for (int64_t k = 0; k < in; ++k) {
        Vec w[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) w[b] = load(weight + b * in * LANES + k * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
            const Vec xs = Vec{} + x[t * in + k];
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[b][t] += xs * w[b];
        }
    }
}

// Call use(t, output, sums of LANES outputs from `output` on) for each token t and B blocks from `block` on.
template <int B, int N, typename W, typename X, typename Use>
void blocks_of(const W* weight, int64_t in, int64_t block, const X* x, int64_t first, Use use) {
    Vec sums[B][N] = {};
    multiply<B, N>(weight + block * in * LANES, in, x + first * in, sums);
    for (int t = 0; t < N; ++t)
        for (int b = 0; b < B; ++b) use(first + t, (block + b) * LANES, sums[b][t]);
}

template <int B, int N, typename W, typename X, typename Use>
void some_blocks(const W* weight, int64_t in, int64_t block, const X* x, int64_t first, int64_t count, Use use) {
    if constexpr (N > 1)
        if (count < N) return some_blocks<B, N - 1>(weight, in, block, x, first, count, use);
    blocks_of<B, N>(weight, in, block, x, first, use);
}

// The product of all tokens with a packed weight `[out, in]`, shared by the threads of a parallel region.
template <typename W, typename X, typename Use>
void product(const W* weight, int64_t out, int64_t in, const X* x, int64_t tokens, Use use) {
    const int64_t blocks = out / LANES;
#pragma omp for schedule(static)
    for (int64_t part = 0; part < (blocks + BLOCKS - 1) / BLOCKS; ++part)
        for (int64_t first = 0; first < tokens; first += MOST) {
            const int64_t count = std::min<int64_t>(MOST, tokens - first), block = part * BLOCKS;
            if (count <= MOST / 2 && block + BLOCKS <= blocks) {
                some_blocks<BLOCKS, MOST / 2>(weight, in, block, x, first, count, use);
                continue;
            }
            const int64_t end = std::min(block + BLOCKS, blocks);
            for (int64_t b = block; b < end; b += 2)
                if (b + 2 <= end) some_blocks<2, MOST>(weight, in, b, x, first, count, use);
                else
                    for (int64_t t = first; t < first + count; ++t) blocks_of<1, 1>(weight, in, b, x, t, use);
        }
}

}  // namespace
