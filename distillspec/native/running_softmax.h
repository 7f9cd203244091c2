// Softmax of some queries over the keys of one slot, from block to block of keys. Scores and sums are float32.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int SPAN = 64;          // keys of a block: their scores are known before their values are read
constexpr float LOWEST = -1e30f;  // score of a key that is not seen

struct Query {
    int first, end;  // keys before the first, and from the end on, are not seen
    uint64_t nodes;  // bit i: the query sees new token i of its row, ALL: every one before its end
};

constexpr uint64_t ALL = ~uint64_t{0};

// Some queries of one row and the key head that they share. T: of keys and values.
template <typename T>
struct RunningSoftmax {
    const T *keys, *values;
    int64_t stride;  // from key to key
    int dim, count;
    float *sum, *most, *total;  // [count, dim], [count] and [count, LANES]
    const Query* seen;
    const T* const* queries;  // [count] of [dim]
    float scale;

    // Turn scores of query `row` with keys start ... start + size - 1 into weights relative to the largest score so far.
    // What was summed before becomes relative to it too. keep(j, weights) stores those of keys start + j ... and returns
    // what it stored. New tokens begin at key `base`.
    template <int KEYS, typename Keep>
    void weigh(float (&scores)[KEYS], int row, int start, int size, int base, Keep keep) {
        for (int j = size; j < KEYS; ++j) scores[j] = LOWEST;
        hide(scores, seen[row], start, size, base);
        Vec top = load(scores), all = load(total + row * LANES);
        for (int j = LANES; j < KEYS; j += LANES) {
            const Vec x = load(scores + j);
            top = x > top ? x : top;
        }
        const float best = largest(top);
        if (best > most[row]) {
            const float shrink = exponential(most[row] - best);
            most[row] = best;
            all *= shrink;
            for (float* own = sum + row * dim; own < sum + (row + 1) * dim; own += LANES) store(load(own) * shrink, own);
        }
        for (int j = 0; j < KEYS; j += LANES) all += keep(j, exponential(load(scores + j) - most[row]));
        store(all, total + row * LANES);
    }

    static void hide(float* scores, const Query& own, int start, int size, int base) {
        for (int j = 0; j < std::min(size, own.first - start); ++j) scores[j] = LOWEST;
        for (int j = std::max(0, own.end - start); j < size; ++j) scores[j] = LOWEST;
        if (own.nodes == ALL) return;
        for (int j = std::max(0, base - start); j < std::min(size, own.end - start); ++j)
            if (!(own.nodes >> (start + j - base) & 1)) scores[j] = LOWEST;
    }

    // Ask memory for a key or value, which is read soon.
    void fetch(const T* held, int key) const {
        for (int c = 0; c < dim; c += LINE / int(sizeof(T))) __builtin_prefetch(held + key * stride + c);
    }
};

}  // namespace
