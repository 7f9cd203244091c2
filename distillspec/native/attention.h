// Attention of some queries over the keys of one slot. Scores, weights and sums are float32.

#pragma once

#include <type_traits>
#include <vector>

#include "tiled_attention.h"

namespace {

constexpr int ROWS = 4;             // queries that share each load of a key or value
constexpr int KEYS = LANES / ROWS;  // keys of a tile: its scores fill one vector
constexpr int COLUMNS = LANES / 4;  // vectors of a value whose sums stay in registers

template <typename T>
struct Head : RunningSoftmax<T> {
    using RunningSoftmax<T>::keys, RunningSoftmax<T>::values, RunningSoftmax<T>::stride, RunningSoftmax<T>::dim;
    using RunningSoftmax<T>::count, RunningSoftmax<T>::sum;
    static constexpr int BLOCK = SPAN;
    std::vector<float> scaled;  // [count, dim] queries

    explicit Head(const RunningSoftmax<T>& of) : RunningSoftmax<T>(of), scaled(of.count * of.dim) {
        for (int r = 0; r < count; ++r)
            for (int c = 0; c < dim; c += LANES) store(load(of.queries[r] + c) * of.scale, &scaled[r * dim + c]);
    }

    // Read keys start ... start + size - 1, of which those from `base` on are new tokens.
    void read(int start, int size, int base) {
        for (int row = 0; row < count; row += ROWS) {
            alignas(64) float weights[ROWS][SPAN];
            for (int j = 0; j < size; j += KEYS) {
                const int some = std::min(KEYS, size - j);
                for (int i = 0; row == 0 && i < KEYS; ++i) this->fetch(values, start + j + i);
                alignas(64) float tile[ROWS][KEYS];
                store(score(row, start + j, some), tile[0]);
                for (int r = 0; r < ROWS; ++r) std::memcpy(weights[r] + j, tile[r], sizeof tile[r]);
            }
            const int rows = std::min(ROWS, count - row);
            for (int r = 0; r < rows; ++r) {
                const auto keep = [&](int j, Vec own) { return store(own, weights[r] + j), own; };
                this->weigh(weights[r], row + r, start, size, base, keep);
            }
            for (int c = 0; c < dim; c += COLUMNS * LANES) {
                const int vectors = std::min(COLUMNS, (dim - c) / LANES);
                if (vectors == COLUMNS) mix<COLUMNS>(weights, start, size, row, rows, c);
                else for (int i = 0; i < vectors; ++i) mix<1>(weights, start, size, row, rows, c + i * LANES);
            }
        }
    }

    // Return the scores `[ROWS, KEYS]` of queries from `row` on with keys from `key` on, of which `size` exist.
    Vec score(int row, int key, int size) {
        Vec parts[LANES] = {};
        const float* q[ROWS];
        const T* k[KEYS];
        for (int r = 0; r < ROWS; ++r) q[r] = &scaled[std::min(row + r, count - 1) * dim];
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

    template <int W>
    void mix(const float (*weights)[SPAN], int start, int size, int row, int rows, int column) {
        Vec sums[ROWS][W] = {};
        const T* value = values + start * stride + column;
#pragma GCC unroll 1
        for (int j = 0; j < size; ++j, value += stride) {
            if (row == 0 && column == 0) this->fetch(keys, start + SPAN + j);
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

// Attend with `count` queries of one row that share a key head: query(r) and out(r) say where each lies, sees(r) which keys
// it sees. The row has `end` keys, its own new ones from `base` on.
template <typename T, typename Out, typename QueryAt, typename OutAt, typename Seen>
void attend_some(const T* keys, const T* values, int64_t place, int64_t base, int64_t end, int64_t dim, int64_t count,
                 float scale, QueryAt query, OutAt out, Seen sees) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;  // tiles of queries
    Lines<float> space(whole * (dim + 1) + count * LANES);
    std::vector<Query> seen(count);
    std::vector<const T*> queries(count);
    float *sum = space.data(), *most = sum + whole * dim, *total = most + whole;
    int64_t first = end;
    for (int64_t r = 0; r < count; ++r) {
        queries[r] = query(r);
        seen[r] = sees(r);
        first = std::min<int64_t>(first, seen[r].first);
        most[r] = LOWEST;
    }
    const RunningSoftmax<T> softmax{keys, values, place,       int(dim),       int(count), sum,
                                    most, total,  seen.data(), queries.data(), scale};
    const auto read_with = [&](auto&& part) {
        constexpr int64_t BLOCK = std::decay_t<decltype(part)>::BLOCK;
        for (int64_t start = first / BLOCK * BLOCK; start < end; start += BLOCK)  // whatever is read together
            part.read(int(start), int(std::min<int64_t>(BLOCK, end - start)), int(base));
    };
    if constexpr (BY_PAIRS<T>) {
        if (dim % (2 * LANES)) read_with(Head<T>(softmax));
        else if (!may_use_tiles()) read_with(PairedHead<T>(softmax));
        else if constexpr (TILES) read_with(TiledHead<T>(softmax));
    } else {
        read_with(Head<T>(softmax));
    }
    for (int64_t r = 0; r < count; ++r) {
        Out* own = out(r);
        const Vec all = all_of(sum_of(load(total + r * LANES)));
        for (int64_t c = 0; c < dim; c += LANES) store(load(sum + r * dim + c) / all, own + c);
    }
}

}  // namespace
