// Products of some tokens with packed weights, shared by the threads of a parallel region.
//
// Weights have 16 bits: bfloat16 for models in bfloat16, float16 for those in float32. Those of a draft in float32 may have
// 8, and a scale for each output behind all weights. They are packed so that a vector holds the same input (or two
// neighbouring ones) of LANES outputs. Sums are float32. Activations are bfloat16 where the
// processor multiplies pairs of bfloat16 and the model is in it, else float32.

#pragma once

#include <omp.h>

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

// The most tokens that one read of weights serves with 2, 3 and 4 blocks of LANES outputs computed together: so many that their
// sums fill the registers, of which AVX-512 has 32, others 16. Fewer tokens take more blocks: a sum must wait for the one before.
constexpr bool MANY = LANES == 16;
constexpr int WITH_TWO = MANY ? 8 : 6, WITH_THREE = 4, WITH_FOUR = MANY ? 4 : 2;
constexpr int CHUNK = 4, LONG = 12;  // blocks that stay in the cache while all tokens are multiplied with them

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
    constexpr int64_t STEP = LINE / (LANES * sizeof(W));  // inputs in a line of the cache
    for (int64_t start = 0; start < in; start += STEP) {
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) __builtin_prefetch(weight + (B + b) * in * LANES + start * LANES);  // the next blocks
        const int64_t end = std::min(start + STEP, in);
#pragma GCC unroll 1  // more of them do not fit the registers
        for (int64_t k = start; k < end; ++k) {
            Vec w[B];
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) w[b] = load(weight + b * in * LANES + k * LANES);
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) {
                const Vec xs = all_of(x[t * in + k]);
#pragma GCC unroll 8
                for (int b = 0; b < B; ++b) sums[b][t] += xs * w[b];
            }
        }
    }
}

// A packed weight `[out, in]`.
template <typename W>
struct Packed {
    const W* held;
    int64_t out, in;

    const W* block(int64_t i) const { return held + i * in * LANES; }

    Vec scaled(Vec sums, int64_t output) const {
        if constexpr (sizeof(W) == 1) return sums * load((const float*)(held + out * in) + output);
        else return sums;
    }
};

// Call use(t, output, sums of LANES outputs from `output` on) for each token t and B blocks from `block` on.
template <int B, int N, typename W, typename X, typename Use>
void blocks_of(const Packed<W>& weight, int64_t block, const X* x, int64_t first, Use use) {
    Vec sums[B][N] = {};
    multiply<B, N>(weight.block(block), weight.in, x + first * weight.in, sums);
    for (int t = 0; t < N; ++t)
        for (int b = 0; b < B; ++b) {
            const int64_t output = (block + b) * LANES;
            use(first + t, output, weight.scaled(sums[b][t], output));
        }
}

template <int B, int N, typename W, typename X, typename Use>
void some_blocks(const Packed<W>& weight, int64_t block, const X* x, int64_t first, int64_t count, Use use) {
    if constexpr (N > 1)
        if (count < N) return some_blocks<B, N - 1>(weight, block, x, first, count, use);
    blocks_of<B, N>(weight, block, x, first, use);
}

// The product of all tokens with a packed weight `[out, in]`, shared by the threads of a parallel region.
template <typename W, typename X, typename Use>
void product(const W* held, int64_t out, int64_t in, const X* x, int64_t tokens, Use use) {
    const Packed<W> weight{held, out, in};
    const int64_t blocks = out / LANES;
    const int64_t parts = (tokens + WITH_TWO - 1) / WITH_TWO, even = (tokens + parts - 1) / parts;
    // With 16 registers the first part waits for memory, so that it takes as many tokens as it can.
    const int64_t most = MANY ? even : WITH_TWO;
    const bool few_threads = blocks >= 3 * LONG * omp_get_num_threads();
    const int64_t chunk = !MANY && few_threads ? LONG : CHUNK;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block += chunk)
        for (int64_t first = 0; first < tokens; first += most) {
            const int64_t count = std::min(most, tokens - first), end = std::min(block + chunk, blocks);
            int64_t b = block;
            if (count <= WITH_FOUR)
                for (; b + 4 <= end; b += 4) some_blocks<4, WITH_FOUR>(weight, b, x, first, count, use);
            else if (count <= WITH_THREE && chunk == LONG)
                for (; b + 3 <= end; b += 3) some_blocks<3, WITH_THREE>(weight, b, x, first, count, use);
            for (; b + 2 <= end; b += 2) some_blocks<2, WITH_TWO>(weight, b, x, first, count, use);
            for (; b < end; ++b) some_blocks<1, WITH_TWO>(weight, b, x, first, count, use);
        }
}

}  // namespace
