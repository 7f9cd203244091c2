// Attention in bfloat16 where the processor multiplies pairs of it. Each block of keys and values is laid out anew, in the
// first cache, so that no products are added across lanes. Weights are rounded to bfloat16, sums are float32.

#pragma once

#include <vector>

#include "running_softmax.h"

namespace {

template <typename T>
struct PairedHead;

#if defined(__AVX512BF16__)

constexpr int TOGETHER = 6;   // queries whose sums are in registers
constexpr int TILE = 2;       // vectors of keys of such sums
constexpr int VALUES = 4;     // vectors of values of such sums
constexpr int PAIRED = 2 * LANES;  // numbers of a vector

typedef uint16_t Numbers __attribute__((vector_size(2 * PAIRED)));

// Transpose a square of pairs: lane i of vector j becomes lane j of vector i. Squares of STEP are transposed already.
template <int STEP>
inline void transpose(Words (&square)[LANES]) {
    if constexpr (STEP < LANES) {
        Ints low, high;
        for (int i = 0; i < LANES; ++i) {
            low[i] = i & STEP ? LANES + i - STEP : i;
            high[i] = i & STEP ? LANES + i : i + STEP;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i)
            if (!(i & STEP)) {
                const Words a = square[i], b = square[i + STEP];
                square[i] = __builtin_shuffle(a, b, low);
                square[i + STEP] = __builtin_shuffle(a, b, high);
            }
        transpose<2 * STEP>(square);
    }
}

// Two rows of numbers side by side, as pairs: of LANES numbers in to[0], of the next ones in to[1].
inline void join(const uint16_t* a, const uint16_t* b, Pairs* to) {
    Numbers low, high, first, second;
    for (int i = 0; i < PAIRED; ++i) low[i] = i / 2 + i % 2 * PAIRED, high[i] = low[i] + LANES;
    std::memcpy(&first, a, sizeof first);
    std::memcpy(&second, b, sizeof second);
    to[0] = (Pairs)__builtin_shuffle(first, second, low);
    to[1] = (Pairs)__builtin_shuffle(first, second, high);
}

template <typename T>
struct PairedHead : RunningSoftmax<T> {
    using Base = RunningSoftmax<T>;
    using Base::keys, Base::values, Base::stride, Base::dim, Base::count, Base::sum;
    static constexpr int BLOCK = SPAN;
    Pairs* turned;  // [dim / 2, SPAN]: the same two numbers of all keys of the block
    Pairs* joined;  // [SPAN / 2, dim]: the values of two keys

    explicit PairedHead(const Base& of) : Base(of) {
        static thread_local Lines<uint16_t> own;
        if (int(own.size()) < 2 * SPAN * dim) own.resize(2 * SPAN * dim);
        turned = (Pairs*)own.data();
        joined = turned + SPAN * dim / PAIRED;
    }

    // Read keys start ... start + size - 1, of which those from `base` on are new tokens.
    void read(int start, int size, int base) {
        turn(start, size);
        if (count <= TOGETHER) return some<TOGETHER, true>(0, count, start, size, base);
        for (int j = 0; j < size; j += 2)
            for (int c = 0; c < dim; c += PAIRED) join_at(start, size, j, c, joined + (j / 2 * dim + c) / LANES);
        for (int row = 0; row < count; row += TOGETHER)
            some<TOGETHER, false>(row, std::min(TOGETHER, count - row), start, size, base);
    }

    void turn(int start, int size) {
        for (int j = 0; j < size; j += LANES) {
            const T* from[LANES];
            for (int i = 0; i < LANES; ++i) from[i] = keys + (start + std::min(j + i, size - 1)) * stride;
            for (int c = 0; c < dim; c += PAIRED) {
                Words square[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; ++i) {
                    std::memcpy(&square[i], from[i] + c, sizeof square[i]);
                    fetch_next(from[i] + c);
                }
                transpose<1>(square);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; ++i) turned[((c / 2 + i) * SPAN + j) / LANES] = (Pairs)square[i];
            }
        }
    }

    void join_at(int start, int size, int j, int column, Pairs* to) {
        const T *a = values + (start + j) * stride + column, *b = j + 1 < size ? a + stride : a;
        join(a, b, to);
        fetch_next(a);
        fetch_next(b);
    }

    // Ask memory for what lies a block behind. The second cache has room for it.
    void fetch_next(const T* from) const { __builtin_prefetch(from + SPAN * stride, 0, 2); }

    // ALONE: of all queries, so that values are joined as they are read.
    template <int R, bool ALONE>
    void some(int row, int rows, int start, int size, int base) {
        if constexpr (R > 1)
            if (rows < R) return some<R - 1, ALONE>(row, rows, start, size, base);
        alignas(64) float scores[R][SPAN];
        alignas(64) uint16_t weights[R][SPAN];
        for (int j = 0; j < size; j += TILE * LANES) score<R>(row, j, scores);
        for (int r = 0; r < R; ++r)
            this->weigh(scores[r], row + r, start, size, base, [&](int j, Vec own) {
                const auto halves = _mm512_cvtneps_pbh((__m512)own);
                std::memcpy(weights[r] + j, &halves, sizeof halves);
                return load(weights[r] + j);
            });
        int c = 0;
        for (; c + VALUES * LANES <= dim; c += VALUES * LANES) mix<R, VALUES, ALONE>(weights, start, size, row, c);
        for (; c < dim; c += PAIRED) mix<R, 2, ALONE>(weights, start, size, row, c);
    }

    // scores[r][j ...] of queries from `row` on. Those of keys that the block does not have mean nothing.
    template <int R>
    void score(int row, int j, float (&scores)[R][SPAN]) {
        Vec sums[R][TILE] = {};
        for (int c = 0; c < dim; c += 2) {
            const Pairs* held = turned + (c / 2 * SPAN + j) / LANES;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Pairs own = all_of_pair(this->queries[row + r] + c);
#pragma GCC unroll 8
                for (int i = 0; i < TILE; ++i) sums[r][i] = add_products(sums[r][i], own, held[i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < TILE; ++i) store(sums[r][i] * this->scale, scores[r] + j + i * LANES);
    }

    template <int R, int V, bool ALONE>
    void mix(const uint16_t (&weights)[R][SPAN], int start, int size, int row, int column) {
        Vec sums[R][V] = {};
        for (int j = 0; j < size; j += 2) {
            Pairs held[V];
            const Pairs* before = joined + (j / 2 * dim + column) / LANES;
#pragma GCC unroll 8
            for (int i = 0; i < V; ++i)
                if (!ALONE) held[i] = before[i];
                else if (i % 2 == 0) join_at(start, size, j, column + i * LANES, held + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Pairs own = all_of_pair(weights[r] + j);
#pragma GCC unroll 8
                for (int i = 0; i < V; ++i) sums[r][i] = add_products(sums[r][i], own, held[i]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) {
                float* own = sum + (row + r) * dim + column + i * LANES;
                store(load(own) + sums[r][i], own);
            }
    }
};

#endif

}  // namespace
