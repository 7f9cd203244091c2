// Attention of some queries over the keys of one slot. Scores and sums are float32. Weights are too, but bfloat16 where the
// processor multiplies pairs of bfloat16.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int ROWS = 4;             // queries that share each load of a key or value
constexpr int KEYS = LANES / ROWS;  // keys of a tile: its scores fill one vector
constexpr int SPAN = 64;           // keys whose scores are known before their values are read
constexpr int COLUMNS = LANES / 4;  // vectors of a value whose sums stay in registers
constexpr float LOWEST = -1e30f;    // score of a key that is not seen

struct Query {
    int first;       // keys before this one are not seen
    uint64_t nodes;  // bit i: the query sees new token i of its row
};

// Some queries of one row and the key head that they share. Softmax goes from block to block of keys.
template <typename T>
struct Head {
    const T *keys, *values;
    int64_t stride;  // from key to key
    int dim, count;
    float *queries, *sum, *most, *total;  // [count, dim] scaled, [count, dim], [count] and [count, LANES]
    const Query* seen;
    const T* const* given;  // [count] queries as they came
    float scale;

    // Read keys start ... start + size - 1, of which those from `base` on are new tokens.
    void read(int start, int size, int base) {
        for (int row = 0; row < count; row += ROWS) {
            alignas(64) float weights[ROWS][SPAN];
            for (int j = 0; j < size; j += KEYS) {
                const int some = std::min(KEYS, size - j);
                if (row == 0 && !by_pairs()) fetch(values, start + j);
                alignas(64) float tile[ROWS][KEYS];
                store(by_pairs() ? score_pairs(row, start + j, some) : score(row, start + j, some), tile[0]);
                for (int r = 0; r < ROWS; ++r) std::memcpy(weights[r] + j, tile[r], sizeof tile[r]);
            }
            const int rows = std::min(ROWS, count - row);
            for (int r = 0; r < ROWS; ++r) {
                float* own = weights[r];
                std::fill(own + size, own + SPAN, LOWEST);
                if (r < rows) {
                    hide(own, row + r, start, size, base);
                    soften(own, row + r);
                }
            }
            if (by_pairs()) {
                mix_pairs(weights, start, size, row, rows);
                continue;
            }
            for (int c = 0; c < dim; c += COLUMNS * LANES) {
                const int vectors = std::min(COLUMNS, (dim - c) / LANES);
                if (vectors == COLUMNS) mix<COLUMNS>(weights, start, size, row, rows, c);
                else for (int i = 0; i < vectors; ++i) mix<1>(weights, start, size, row, rows, c + i * LANES);
            }
        }
    }

    // Ask memory for KEYS keys or values, which are read soon.
    void fetch(const T* held, int key) const {
        for (int j = 0; j < KEYS; ++j)
            for (int c = 0; c < dim; c += LINE / int(sizeof(T))) __builtin_prefetch(held + (key + j) * stride + c);
    }

    // Products of bfloat16 are computed in pairs where heads fill whole vectors of them.
    bool by_pairs() const {
#if defined(__AVX512BF16__)
        return sizeof(T) == 2 && dim % WIDTH == 0;
#else
        return false;
#endif
    }

#if defined(__AVX512BF16__)
    Vec score_pairs(int row, int key, int size) {  // as `score`
        Vec parts[LANES] = {};
        for (int c = 0; c < dim; c += WIDTH) {
            Pairs q[ROWS];
            for (int r = 0; r < ROWS; ++r) q[r] = pairs((const uint16_t*)given[std::min(row + r, count - 1)] + c);
            for (int j = 0; j < KEYS; ++j) {
                const Pairs k = pairs((const uint16_t*)keys + (key + std::min(j, size - 1)) * stride + c);
                for (int r = 0; r < ROWS; ++r) parts[r * KEYS + j] = add_products(parts[r * KEYS + j], q[r], k);
            }
        }
        return sums<LANES>(parts) * scale;
    }

    // Two keys' values are multiplied at once. Interleaving them leaves columns 0-3, 8-11, … in one vector of sums.
    template <int W>
    void mix_pairs(const uint16_t (*weights)[SPAN], int start, int size, int row, int rows, int column) {
        Vec sums[ROWS][2 * W] = {};
        for (int j = 0; j < size; j += 2) {
            const uint16_t* value = (const uint16_t*)values + (start + j) * stride + column;
            Pairs v[2 * W];
            for (int i = 0; i < W; ++i) {
                const Pairs a = pairs(value + i * WIDTH), b = pairs(value + (j + 1 < size ? stride : 0) + i * WIDTH);
                v[2 * i] = _mm512_unpacklo_epi16(a, b);
                v[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
            }
            for (int r = 0; r < ROWS; ++r) {
                int32_t both;
                std::memcpy(&both, weights[r] + j, sizeof both);
                for (int i = 0; i < 2 * W; ++i) sums[r][i] = add_products(sums[r][i], _mm512_set1_epi32(both), v[i]);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < 2 * W; ++i) {
                const Vec own = __builtin_shuffle(sums[r][i & ~1], sums[r][i | 1], i & 1 ? SECOND : FIRST);
                float* to = sum + (row + r) * dim + column + i * LANES;
                store(load(to) + own, to);
            }
    }

    void mix_pairs(const float (*weights)[SPAN], int start, int size, int row, int rows) {
        alignas(64) uint16_t halves[ROWS][SPAN];
        for (int r = 0; r < ROWS; ++r) {
            for (int j = 0; j < SPAN; j += LANES) store(load(weights[r] + j), halves[r] + j);
            if (size < SPAN) halves[r][size] = 0;
        }
        for (int c = 0; c < dim; c += 2 * WIDTH)
            if (c + WIDTH < dim) mix_pairs<2>(halves, start, size, row, rows, c);
            else mix_pairs<1>(halves, start, size, row, rows, c);
    }
#else
    Vec score_pairs(int, int, int) { return Vec{}; }
    void mix_pairs(const float (*)[SPAN], int, int, int, int) {}
#endif

    // Return the scores `[ROWS, KEYS]` of queries from `row` on with keys from `key` on, of which `size` exist.
    Vec score(int row, int key, int size) {
        Vec parts[LANES] = {};
        const float* q[ROWS];
        const T* k[KEYS];
        for (int r = 0; r < ROWS; ++r) q[r] = queries + std::min(row + r, count - 1) * dim;
        for (int j = 0; j < KEYS; ++j) k[j] = keys + (key + std::min(j, size - 1)) * stride;
#pragma GCC unroll 1
        for (int c = 0; c < dim; c += LANES) {
            Vec held[KEYS];
#pragma GCC unroll 8
            for (int j = 0; j < KEYS; ++j) held[j] = load(k[j] + c);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Vec own = load(q[r] + c);
#pragma GCC unroll 8
                for (int j = 0; j < KEYS; ++j) parts[r * KEYS + j] += own * held[j];
            }
        }
        return sums<LANES>(parts);
    }

    void hide(float* scores, int row, int start, int size, int base) {
        const Query& own = seen[row];
        for (int j = 0; j < std::min(size, own.first - start); ++j) scores[j] = LOWEST;
        for (int j = std::max(0, base - start); j < size; ++j)
            if (!(own.nodes >> (start + j - base) & 1)) scores[j] = LOWEST;
    }

    // Turn scores into weights relative to the largest score so far, and what was summed before to the same.
    void soften(float* scores, int row) {
        Vec top = load(scores), all = load(total + row * LANES);
        for (int j = LANES; j < SPAN; j += LANES) {
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
        for (int j = 0; j < SPAN; j += LANES) {
            Vec e = exponential(load(scores + j) - most[row]);
            if (by_pairs()) e = rounded(e, keys);
            store(e, scores + j);
            all += e;
        }
        store(all, total + row * LANES);
    }

    template <int W>
    void mix(const float (*weights)[SPAN], int start, int size, int row, int rows, int column) {
        Vec sums[ROWS][W] = {};
        const T* value = values + start * stride + column;
#pragma GCC unroll 1
        for (int j = 0; j < size; ++j, value += stride) {
            if (row == 0 && j % KEYS == 0 && column == 0) fetch(keys, start + SPAN + j);
            Vec v[W];
#pragma GCC unroll 8
            for (int i = 0; i < W; ++i) v[i] = load(value + i * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Vec weight = all_of(weights[r][j]);
#pragma GCC unroll 8
                for (int i = 0; i < W; ++i) sums[r][i] += weight * v[i];
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < W; ++i) {
                float* own = sum + (row + r) * dim + column + i * LANES;
                store(load(own) + sums[r][i], own);
            }
    }
};

// Attend with `count` queries of one row that share a key head: query(r) and out(r) say where each lies, nodes(r) which
// new tokens it sees, first(r) before which key it sees none. The row has `end` keys, its own new ones from `base` on.
template <typename T, typename Out, typename QueryAt, typename OutAt, typename Seen>
void attend_some(const T* keys, const T* values, int64_t place, int64_t base, int64_t end, int64_t dim, int64_t count,
                 float scale, QueryAt query, OutAt out, Seen sees) {
    std::vector<float> space(count * (2 * dim + 1 + LANES));
    std::vector<Query> seen(count);
    std::vector<const T*> given(count);
    float *scaled = space.data(), *sum = scaled + count * dim, *most = sum + count * dim, *total = most + count;
    int64_t start = end;
    for (int64_t r = 0; r < count; ++r) {
        given[r] = query(r);
        for (int64_t c = 0; c < dim; c += LANES) store(load(given[r] + c) * scale, scaled + r * dim + c);
        seen[r] = sees(r);
        start = std::min<int64_t>(start, seen[r].first);
        most[r] = LOWEST;
    }
    Head<T> part{keys,   values, place, int(dim),    int(count),   scaled, sum,
                 most,   total,  seen.data(), given.data(), scale};
    for (; start < end; start += SPAN)
        part.read(int(start), int(std::min<int64_t>(SPAN, end - start)), int(base));
    for (int64_t r = 0; r < count; ++r) {
        Out* own = out(r);
        const Vec all = all_of(sum_of(load(total + r * LANES)));
        for (int64_t c = 0; c < dim; c += LANES) store(load(sum + r * dim + c) / all, own + c);
    }
}

}  // namespace
