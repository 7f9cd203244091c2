// Products of some tokens with packed weights, shared by the threads of a parallel region.

#pragma once

#include <omp.h>

#include <algorithm>

#include "tiles.h"

#if defined(__x86_64__) && !defined(__AVX2__)
#error "a processor with AVX2 is needed: without it torch is faster"
#endif

namespace {

// Blocks of LANES outputs that are computed together, and the most tokens that one read of their weights serves: so many that
// their sums fill the registers, of which AVX-512 has 32, others 16. Few tokens take more blocks: a sum must wait for the one
// before. A chunk of blocks stays in the cache while all tokens are multiplied with it, and the next one is on its way.
constexpr bool MANY = LANES == 16;
constexpr int BLOCKS = 2, TOKENS = MANY ? 8 : 6, CHUNK = MANY ? 2 : 6;
constexpr int FEW_BLOCKS = MANY ? 4 : 3, FEW_TOKENS = MANY ? 2 : 4, FEW_CHUNK = MANY ? 4 : 6;
constexpr int ONE_BY_ONE = MANY ? 6 : 0;  // for so many tokens, if not few, one block at a time is nearer to memory's bandwidth

// sums[b][t] += block b of a packed weight times token t. `x` has `in` numbers a token. Codes are read by inputs in fours.
template <int B, int N, typename W>
INLINED void multiply(const W* weight, int64_t in, const uint16_t* x, Ahead<W> ahead, Vec (&sums)[B][N]) {
#if defined(__AVX512BF16__)
    constexpr int64_t LINE_INPUTS = LINE_OF<W> / LANES;
    for (int64_t start = 0; start < in; start += LINE_INPUTS) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < LINE_INPUTS; i += 2) {
            const int64_t k = start + i;
            Pairs w[B];
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) {
                if (i == 0) __builtin_prefetch(ahead.from + b * in * LANES, 0, 2);
                w[b] = inputs(weight + b * in * LANES + k * LANES);
            }
            if (i == 0) ahead.from += ahead.step;
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) {
                const Pairs xs = all_of_pair(x + t * in + k);
#pragma GCC unroll 8
                for (int b = 0; b < B; ++b) sums[b][t] = add_products(sums[b][t], xs, w[b]);
            }
        }
    }
#endif
}

// The same for few tokens, with sums rounded as tiles round them: first of each 32 inputs, those at even and at odd places apart.
template <int B, int N>
INLINED void multiply_as_tiles(const uint16_t* weight, int64_t in, const uint16_t* x, Ahead<uint16_t> ahead, Vec (&sums)[B][N]) {
#if defined(HAS_TILES)
    for (int64_t start = 0; start < in; start += TILE_INPUTS) {
        Vec even[B][N] = {}, odd[B][N] = {};
#pragma GCC unroll 1
        for (int64_t k = start; k < start + TILE_INPUTS; k += 2) {
            Vec first[N], second[N];
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) split(all_of_pair(x + t * in + k), first[t], second[t]);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) {
                __builtin_prefetch(ahead.from + b * in * LANES, 0, 2);
                Vec low, high;
                split(inputs(weight + b * in * LANES + k * LANES), low, high);
#pragma GCC unroll 8
                for (int t = 0; t < N; ++t) even[b][t] += first[t] * low, odd[b][t] += second[t] * high;
            }
            ahead.from += ahead.step;
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b)
#pragma GCC unroll 8
            for (int t = 0; t < N; ++t) sums[b][t] += even[b][t] + odd[b][t];
    }
#endif
}

template <int B, int N, typename W>
INLINED void multiply(const W* weight, int64_t in, const float* x, Ahead<W> ahead, Vec (&sums)[B][N]) {
    constexpr int64_t LINE_INPUTS = LINE_OF<W> / LANES;
    for (int64_t start = 0; start < in; start += LINE_INPUTS) {
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) __builtin_prefetch(ahead.from + b * in * LANES, 0, 2);
        ahead.from += ahead.step;
        const int64_t end = std::min(start + LINE_INPUTS, in);
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

// Call use(t, output, sums of LANES outputs from `output` on) for `count` tokens from `first` on, at most N, and for B
// blocks from `block` on.
template <int B, int N, bool AS_TILES, typename W, typename X, typename Use>
void some_blocks(const Packed<W>& weight, int64_t block, const X* x, int64_t first, int64_t count, Ahead<W> ahead, Use use) {
    if constexpr (N > 1)
        if (count < N) return some_blocks<B, N - 1, AS_TILES>(weight, block, x, first, count, ahead, use);
    Vec sums[B][N];  // in registers only where all loops over them are unrolled
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t) {
        const Vec begin = weight.first_sum(x + (first + t) * weight.in);
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) sums[b][t] = begin;
    }
    if constexpr (AS_TILES) multiply_as_tiles<B, N>(weight.block(block), weight.in, x + first * weight.in, ahead, sums);
    else multiply<B, N>(weight.block(block), weight.in, x + first * weight.in, ahead, sums);
#pragma GCC unroll 8
    for (int t = 0; t < N; ++t)
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) {
            const int64_t output = (block + b) * LANES;
            use(first + t, output, weight.scaled(sums[b][t], output));
        }
}

// The product of tokens, in even parts of at most N, with the blocks of one thread, B together.
template <int B, int N, bool AS_TILES = false, typename W, typename X, typename Use>
void own_blocks(const Packed<W>& weight, int64_t begin, int64_t end, int64_t chunk, const X* x, int64_t tokens, Use use) {
    if (tokens == 0) return;
    const int64_t parts = (tokens + N - 1) / N, most = (tokens + parts - 1) / parts;
    for (int64_t start = begin; start < end; start += chunk)
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t first = part * most, count = std::min(most, tokens - first), stop = std::min(start + chunk, end);
            int64_t block = start;
            for (; block + B <= stop; block += B)
                some_blocks<B, N, AS_TILES>(weight, block, x, first, count, weight.ahead(block, chunk, part, parts), use);
            for (; block < stop; ++block)
                some_blocks<1, N, AS_TILES>(weight, block, x, first, count, weight.ahead(block, chunk, part, parts), use);
        }
}

// The product with the blocks of one thread where tiles can be used. With weights of 16 bits that of a single token is rounded as
// theirs, so that a target's results do not depend on how many tokens are read together. Unpacking codes takes as long as
// multiplying three tokens.
template <typename W, typename Use>
void share_by_tiles(const Packed<W>& weight, int64_t begin, int64_t end, const uint16_t* x, int64_t tokens, Use use) {
    constexpr bool AS_TILES = sizeof(W) == 2;
    constexpr int FEW = AS_TILES ? 1 : FEW_TOKENS;
    if (tokens > FEW) return tiled_blocks(weight, begin, end, x, tokens, use);
    const SmallIsZero here;
    own_blocks<FEW_BLOCKS, FEW, AS_TILES>(weight, begin, end, FEW_CHUNK, x, tokens, use);
}

// The product of all tokens with the blocks of one thread, in the way that is the fastest for so many.
template <typename W, typename X, typename Use>
void share(const Packed<W>& weight, int64_t begin, int64_t end, const X* x, int64_t tokens, Use use) {
    if constexpr (TILES && std::is_same_v<X, uint16_t>)
        if (may_use_tiles() && weight.in % TILE_INPUTS == 0) return share_by_tiles(weight, begin, end, x, tokens, use);
    if (tokens <= FEW_TOKENS) own_blocks<FEW_BLOCKS, FEW_TOKENS>(weight, begin, end, FEW_CHUNK, x, tokens, use);
    else if (tokens <= ONE_BY_ONE) own_blocks<1, std::max(1, ONE_BY_ONE)>(weight, begin, end, 1, x, tokens, use);
    else own_blocks<BLOCKS, TOKENS>(weight, begin, end, CHUNK, x, tokens, use);
}

// The product of all tokens with a packed weight `[out, in]`, shared by the threads of a parallel region.
template <typename W, typename X, typename Use>
void product(const W* held, int64_t out, int64_t in, const X* x, int64_t tokens, Use use) {
    const Packed<W> weight{held, out, in};
    const int64_t pairs = out / LANES / 2, threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t begin = 2 * (pairs * thread / threads);
    const int64_t end = thread + 1 < threads ? 2 * (pairs * (thread + 1) / threads) : out / LANES;
    share(weight, begin, end, x, tokens, use);
#pragma omp barrier
}

}  // namespace
