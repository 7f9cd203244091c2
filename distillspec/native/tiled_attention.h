// Attention in bfloat16 by tiles (AMX), of 16 keys times 16 queries. Scores are transposed, so that those of a query lie together.
// Weights are rounded to bfloat16, sums are float32.

#pragma once

#include <vector>

#include "paired_attention.h"
#include "tiles.h"

namespace {

template <typename T>
struct TiledHead;

#if defined(HAS_TILES)

constexpr int TILED_SPAN = 2 * SPAN;  // keys of a block. Blocks are long: a tile of what was just written is read slowly
constexpr int KEY_TILES = TILED_SPAN / TILE_ROWS;
constexpr int FEW_QUERIES = 4;  // transposed with fewer shuffles

// Write from[i][r] to to[r][i], for 16 keys i and the first `rows` queries r.
inline void transpose_scores(const float (*from)[LANES], int rows, float (*to)[TILED_SPAN]) {
    Words square[LANES];
    if (rows <= FEW_QUERIES) {
        Words fours[4], halves[4];
        Ints low, high, front, back;
        for (int i = 0; i < LANES; ++i) {
            low[i] = i % 8 * 4 + i / 8, high[i] = low[i] + 2;
            front[i] = i % 8 + i / 8 * LANES, back[i] = front[i] + 8;
        }
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 4; ++k) std::memcpy((uint32_t*)&fours[i] + 4 * k, from[4 * i + k], 4 * sizeof(float));
        for (int i = 0; i < 2; ++i) {
            halves[i] = __builtin_shuffle(fours[2 * i], fours[2 * i + 1], low);
            halves[2 + i] = __builtin_shuffle(fours[2 * i], fours[2 * i + 1], high);
        }
        for (int i = 0; i < 2; ++i) {
            square[2 * i] = __builtin_shuffle(halves[2 * i], halves[2 * i + 1], front);
            square[2 * i + 1] = __builtin_shuffle(halves[2 * i], halves[2 * i + 1], back);
        }
    } else {
        for (int i = 0; i < LANES; ++i) std::memcpy(&square[i], from[i], sizeof square[i]);
        transpose<1>(square);
    }
    for (int r = 0; r < rows; ++r) std::memcpy(to[r], &square[r], sizeof square[r]);
}

template <typename T>
struct TiledHead : RunningSoftmax<T> {
    using Base = RunningSoftmax<T>;
    using Base::keys, Base::values, Base::stride, Base::dim, Base::count, Base::sum;
    static constexpr int BLOCK = TILED_SPAN;
    uint32_t* joined;          // [BLOCK / 2, dim]: the values of two keys
    uint32_t* transposed;      // [tiles of queries, dim / 2, 16]: two neighbouring numbers of each query
    T *last_keys, *zero_keys;  // [16, dim] each
    const T* key_rows[KEY_TILES];
    int64_t key_bytes[KEY_TILES];  // from row to row

    // `sum` has whole tiles of queries.
    explicit TiledHead(const Base& of) : Base(of) {
        static thread_local Lines<uint32_t> own;
        const int64_t tiles = (count + TILE_ROWS - 1) / TILE_ROWS, pairs = BLOCK / 2 * dim, half = TILE_ROWS * dim / 2;
        if (int64_t(own.size()) < pairs + (2 + tiles) * half) own.resize(pairs + (2 + tiles) * half);
        joined = own.data();
        last_keys = (T*)(joined + pairs);
        zero_keys = last_keys + TILE_ROWS * dim;
        transposed = joined + pairs + 2 * half;
        std::fill(zero_keys, zero_keys + TILE_ROWS * dim, 0);
        for (int row = 0; row < count; row += TILE_ROWS) transpose_queries(row);
        configure_tiles(TILE_ROWS, TILE_ROWS);
    }

    ~TiledHead() { _tile_release(); }

    uint32_t* queries_of(int row) const { return transposed + row / TILE_ROWS * (dim / 2) * LANES; }

    void transpose_queries(int row) {
        for (int c = 0; c < dim; c += PAIRED) {
            Words square[LANES] = {};
            for (int r = 0; r < std::min(TILE_ROWS, count - row); ++r)
                std::memcpy(&square[r], this->queries[row + r] + c, sizeof square[r]);
            transpose<1>(square);
            std::memcpy(queries_of(row) + c / 2 * LANES, square, sizeof square);
        }
    }

    // Read keys start ... start + size - 1, of which those from `base` on are new tokens.
    void read(int start, int size, int base) {
        place_keys(start, size);
        join_values(start, size);
        for (int row = 0; row < count; row += TILE_ROWS) {
            const int rows = std::min(TILE_ROWS, count - row);
            alignas(LINE) float scores[TILE_ROWS][BLOCK];
            alignas(LINE) uint16_t weights[TILE_ROWS][BLOCK];
            score(row, rows, size, scores);
            for (int r = 0; r < rows; ++r)
                this->weigh(scores[r], row + r, start, size, base, [&](int j, Vec own) {
                    if (row == 0 && size == BLOCK) fetch_next(start, r, rows, j);
                    const auto halves = _mm512_cvtneps_pbh((__m512)own);
                    std::memcpy(weights[r] + j, &halves, sizeof halves);
                    return load(weights[r] + j);
                });
            compiler_barrier();
            int c = 0;
            for (; c + VALUES * LANES <= dim; c += VALUES * LANES) mix<VALUES>(weights, size, row, c);
            for (; c < dim; c += PAIRED) mix<2>(weights, size, row, c);
        }
    }

    void place_keys(int start, int size) {
        for (int i = 0; i < KEY_TILES; ++i) {
            const int own = std::min(TILE_ROWS, size - i * TILE_ROWS);
            const T* from = keys + (start + i * TILE_ROWS) * stride;
            key_rows[i] = own == TILE_ROWS ? from : own > 0 ? last_keys : zero_keys;
            key_bytes[i] = (own == TILE_ROWS ? stride : dim) * sizeof(T);
            if (own <= 0 || own == TILE_ROWS) continue;
            for (int r = 0; r < own; ++r) std::copy(from + r * stride, from + r * stride + dim, last_keys + r * dim);
            std::fill(last_keys + own * dim, zero_keys, 0);
        }
    }

    void join_values(int start, int size) {
        for (int j = 0; j < size; j += 2) {
            const T *a = values + (start + j) * stride, *b = j + 1 < size ? a + stride : a;
            for (int c = 0; c < dim; c += PAIRED) join(a + c, b + c, (Pairs*)(joined + j / 2 * dim + c));
        }
        // The keys of a tile that are not there weigh nothing.
        std::fill(joined + (size + 1) / 2 * dim, joined + (size + PAIRED - 1) / PAIRED * LANES * dim, 0);
        compiler_barrier();
    }

    // Ask memory for a share of the next block: of `parts`, the one that has the numbers j ... of each.
    void fetch_next(int start, int part, int parts, int j) const {
        const int own = BLOCK / LANES * part + j / LANES, all = BLOCK / LANES * parts;
        for (int key = BLOCK * own / all; key < BLOCK * (own + 1) / all; ++key)
            for (int c = 0; c < dim; c += PAIRED) {
                const int64_t at = (start + BLOCK + key) * stride + c;
                __builtin_prefetch(keys + at, 0, 2);
                __builtin_prefetch(values + at, 0, 2);
            }
    }

    // scores[r][j]: of queries from `row` on. Those of keys that the block does not have mean nothing.
    void score(int row, int rows, int size, float (&scores)[TILE_ROWS][BLOCK]) const {
        alignas(LINE) float products[SPAN][LANES];
        for (int first = 0; first < size; first += SPAN) {
            multiply_keys(key_rows + first / TILE_ROWS, key_bytes + first / TILE_ROWS, queries_of(row), products);
            for (int j = 0; j < SPAN; j += LANES) {
                for (int i = 0; i < LANES; ++i) store(load(products[j + i]) * this->scale, products[j + i]);
                transpose_scores(products + j, rows, (float(*)[BLOCK])(scores[0] + first + j));
            }
        }
    }

    void multiply_keys(const T* const* from, const int64_t* bytes, const uint32_t* with, float (&to)[SPAN][LANES]) const {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < dim; c += PAIRED) {
            _tile_loadd(6, with + c / 2 * LANES, LINE);
            _tile_loadd(4, from[0] + c, bytes[0]);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, from[1] + c, bytes[1]);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, from[2] + c, bytes[2]);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, from[3] + c, bytes[3]);
            _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, to[0], LINE);
        _tile_stored(1, to[TILE_ROWS], LINE);
        _tile_stored(2, to[2 * TILE_ROWS], LINE);
        _tile_stored(3, to[3 * TILE_ROWS], LINE);
    }

    // Add the block's values to sums of queries from `row` on, of V vectors of columns.
    template <int V>
    void mix(const uint16_t (&weights)[TILE_ROWS][BLOCK], int size, int row, int column) const {
        float* to = sum + row * dim + column;
        const int64_t bytes = dim * sizeof *to;
        _tile_loadd(0, to, bytes);
        _tile_loadd(1, to + LANES, bytes);
        if constexpr (V == 4) {
            _tile_loadd(2, to + 2 * LANES, bytes);
            _tile_loadd(3, to + 3 * LANES, bytes);
        }
        for (int j = 0; j < size; j += PAIRED) {
            const uint32_t* held = joined + j / 2 * dim + column;
            _tile_loadd(4, weights[0] + j, sizeof weights[0]);
            _tile_loadd(6, held, bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, held + LANES, bytes);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (V == 4) {
                _tile_loadd(6, held + 2 * LANES, bytes);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, held + 3 * LANES, bytes);
                _tile_dpbf16ps(3, 4, 7);
            }
        }
        _tile_stored(0, to, bytes);
        _tile_stored(1, to + LANES, bytes);
        if constexpr (V == 4) {
            _tile_stored(2, to + 2 * LANES, bytes);
            _tile_stored(3, to + 3 * LANES, bytes);
        }
    }
};

#endif

}  // namespace
