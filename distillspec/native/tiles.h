// Products of bfloat16 by tiles of 16 tokens and 16 outputs (AMX). A tile takes as long for 16 tokens as for one.

#pragma once

#include <algorithm>
#include <vector>

#include "packed.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#endif

namespace {

constexpr int TILE_INPUTS = 32;

#if defined(HAS_TILES)

constexpr bool TILES = true;
constexpr int TILE_ROWS = 16;          // of a tile of tokens. One of weights, which lies in memory in one piece, has pairs for rows
constexpr int64_t MOST_UNPACKED = 4;   // blocks

// Linux saves tiles only of programs that ask for them.
inline bool may_use_tiles() {
    constexpr int ASK = 0x1023, DATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ASK, DATA) == 0;
    return may;
}

// What the compiler does not know of: tiles are read from memory that was just written.
inline void finish_writes() { asm volatile("" ::: "memory"); }

// Of the calling thread: sums are tiles 0 to 3, tokens 4 and 5, weights 6 and 7. `first` tokens of tiles 0, 1 and 4, `second`
// of 2, 3 and 5. With none second all sums are of the first.
inline void shape_tiles(int first, int second) {
    struct alignas(LINE) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const int others = second ? second : first, rows[] = {first, first, others, others, first, others, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; ++i) shapes.bytes[i] = LINE, shapes.rows[i] = uint8_t(rows[i]);
    finish_writes();
    _tile_loadconfig(&shapes);
}

inline void fetch_tile(const uint16_t* from) {
    for (int i = 0; i < TILE_ROWS; ++i) __builtin_prefetch(from + i * TILE_INPUTS, 0, 2);
}

typedef float Sums[TILE_ROWS][LANES];

// Multiply the tokens of one tile with B blocks that lie `apart`. `ahead`: the first block that is multiplied later, null for none.
template <int B>
inline void multiply_tile(const uint16_t* weight, int64_t in, const uint16_t* x, const uint16_t* ahead, Sums* sums) {
    const int64_t apart = in * LANES, bytes = in * sizeof *x;
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (B > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < in; k += TILE_INPUTS) {
        const uint16_t* w = weight + k * LANES;
        if (ahead)
            for (int b = 0; b < B; ++b) fetch_tile(ahead + b * apart + k * LANES);
        _tile_loadd(4, x + k, bytes);
        _tile_loadd(6, w, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (B > 1) {
            _tile_loadd(7, w + apart, LINE);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (B > 2) {
            _tile_loadd(6, w + 2 * apart, LINE);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 3 * apart, LINE);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums[0], LINE);
    if constexpr (B > 1) _tile_stored(1, sums[1], LINE);
    if constexpr (B > 2) {
        _tile_stored(2, sums[2], LINE);
        _tile_stored(3, sums[3], LINE);
    }
}

// Multiply the tokens of two tiles, the second ones from `y` on, with two blocks. sums: both blocks of the first tokens come first.
inline void multiply_tiles(const uint16_t* weight, int64_t in, const uint16_t* x, const uint16_t* y, const uint16_t* ahead,
                           Sums* sums) {
    const int64_t apart = in * LANES, bytes = in * sizeof *x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < in; k += TILE_INPUTS) {
        const uint16_t* w = weight + k * LANES;
        if (ahead) fetch_tile(ahead + k * LANES), fetch_tile(ahead + apart + k * LANES);
        _tile_loadd(4, x + k, bytes);
        _tile_stream_loadd(6, w, LINE);
        _tile_stream_loadd(7, w + apart, LINE);
        _tile_loadd(5, y + k, bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0], LINE);
    _tile_stored(1, sums[1], LINE);
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
}

// `count` blocks from block i on, in bfloat16.
inline const uint16_t* in_full(const Packed<uint16_t>& weight, int64_t i, int64_t) { return weight.block(i); }

inline const uint16_t* in_full(const Packed<uint8_t>& weight, int64_t i, int64_t count) {
    static thread_local std::vector<uint16_t> held;
    const int64_t numbers = count * weight.in * LANES;
    if (int64_t(held.size()) < numbers) held.resize(MOST_UNPACKED * weight.in * LANES);
    const uint8_t* from = weight.block(i);
    for (int64_t k = 0; k < numbers; k += 2 * LANES) _mm512_storeu_si512(held.data() + k, inputs(from + k));
    finish_writes();
    return held.data();
}

// The product of tokens with some blocks of a packed weight. Calls use(t, output, sums of LANES outputs), as `some_blocks`.
template <typename W, typename Use>
struct Tiled {
    const Packed<W>& weight;
    const uint16_t* x;
    const int64_t end;  // blocks
    Use use;
    const float* begins;  // [tokens]: see `Packed::first_sum`
    int64_t shape[2] = {-1, -1};
    alignas(LINE) Sums sums[4];

    void fit(int64_t first, int64_t second) {
        if (shape[0] == first && shape[1] == second) return;
        shape_tiles(int(shape[0] = first), int(shape[1] = second));
    }

    const uint16_t* tokens(int64_t first) const { return x + first * weight.in; }

    // What to fetch while earlier blocks are multiplied. Codes are in the cache.
    const uint16_t* ahead(int64_t block) const {
        return sizeof(W) == 2 && block < end ? (const uint16_t*)weight.block(block) : nullptr;
    }

    void tell(const Sums& own, int64_t block, int64_t first, int64_t count) {
        const int64_t output = block * LANES;
        for (int64_t t = 0; t < count; ++t)
            use(first + t, output, weight.scaled(all_of(begins[first + t]) + load(own[t]), output));
    }

    template <int B>
    void one_tile(int64_t block, int64_t first, int64_t count) {
        fit(count, 0);
        multiply_tile<B>(in_full(weight, block, B), weight.in, tokens(first), ahead(block + B), sums);
        for (int b = 0; b < B; ++b) tell(sums[b], block + b, first, count);
    }

    // All tokens, by two tiles in even parts, with two blocks.
    void two_tiles(int64_t block, int64_t all) {
        const int64_t parts = (all + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), most = (all + parts - 1) / parts;
        const uint16_t *own = in_full(weight, block, 2), *later = ahead(block + 2);
        for (int64_t start = 0; start < all; start += most, later = nullptr) {
            const int64_t count = std::min(most, all - start), half = (count + 1) / 2, second = start + (half < count ? half : 0);
            fit(half, count - half);
            multiply_tiles(own, weight.in, tokens(start), tokens(second), later, sums);
            for (int b = 0; b < 2; ++b) tell(sums[b], block + b, start, half);
            for (int b = 0; b < 2; ++b) tell(sums[2 + b], block + b, start + half, count - half);
        }
    }

    void run(int64_t block, int64_t all) {
        if (all > TILE_ROWS)
            for (; block + 2 <= end; block += 2) two_tiles(block, all);
        for (; block < end && all > TILE_ROWS; ++block)
            for (int64_t start = 0; start < all; start += TILE_ROWS)
                one_tile<1>(block, start, std::min<int64_t>(TILE_ROWS, all - start));
        for (; block + 4 <= end; block += 4) one_tile<4>(block, 0, all);
        for (; block + 2 <= end; block += 2) one_tile<2>(block, 0, all);
        for (; block < end; ++block) one_tile<1>(block, 0, all);
    }
};

// The product of all tokens with the blocks of one thread, as `own_blocks`.
template <typename W, typename Use>
void tiled_blocks(const Packed<W>& weight, int64_t begin, int64_t end, const uint16_t* x, int64_t tokens, Use use) {
    static thread_local std::vector<float> begins;
    if (int64_t(begins.size()) < tokens) begins.resize(tokens);
    if (sizeof(W) == 1)
        for (int64_t t = 0; t < tokens; ++t) begins[t] = weight.first_sum(x + t * weight.in)[0];
    if (begin == end) return;
    Tiled<W, Use>{weight, x, end, use, begins.data()}.run(begin, tokens);
    _tile_release();
}

#else

constexpr bool TILES = false;

inline bool may_use_tiles() { return false; }

#endif

}  // namespace
