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
constexpr int TILE_ROWS = 16;  // tokens of a tile, or pairs of inputs of a tile of weights, which is one piece of a packed weight
static_assert(TILE_ROWS == LANES && TILE_INPUTS == 2 * LANES);

// Linux saves tiles only of programs that ask for them.
inline bool may_use_tiles() {
    constexpr int ASK = 0x1023, DATA = 18;
    static const bool may = syscall(SYS_arch_prctl, ASK, DATA) == 0;
    return may;
}

// Before tiles are loaded of memory that was just written: the compiler does not know that they read it.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// Set the rows of the thread's tiles: sums are tiles 0 to 3, tokens 4 and 5, weights 6 and 7. `first` tokens are in tiles 0, 1
// and 4, `second` in 2, 3 and 5. Without second ones all sums are of the first.
inline void configure_tiles(int first, int second) {
    struct alignas(LINE) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shapes;
    const int others = second ? second : first, rows[] = {first, first, others, others, first, others, TILE_ROWS, TILE_ROWS};
    for (int i = 0; i < 8; ++i) shapes.bytes[i] = LINE, shapes.rows[i] = uint8_t(rows[i]);
    compiler_barrier();
    _tile_loadconfig(&shapes);
}

inline void fetch_tile(const uint16_t* from) {
    for (int i = 0; i < TILE_ROWS; ++i) __builtin_prefetch(from + i * TILE_INPUTS, 0, 2);
}

typedef float Sums[TILE_ROWS][LANES];

// Of some blocks and inputs of a weight: the first one's numbers, and how far those of the next block are.
struct Piece {
    const uint16_t* numbers;
    int64_t apart;
};

inline Piece unpacked(const Packed<uint16_t>& weight, int64_t block, int64_t, int64_t start, int64_t) {
    return {weight.block(block) + start * LANES, weight.in * LANES};
}

// Codes, as bfloat16. Overwritten by the next call.
inline Piece unpacked(const Packed<uint8_t>& weight, int64_t block, int64_t count, int64_t start, int64_t size) {
    static thread_local Lines<uint16_t> held;
    const int64_t numbers = size * LANES;
    if (int64_t(held.size()) < count * numbers) held.resize(count * numbers);
    for (int64_t b = 0; b < count; ++b) {
        const uint8_t* from = weight.block(block + b) + start * LANES;
        for (int64_t k = 0; k < numbers; k += 2 * LANES) _mm512_storeu_si512(held.data() + b * numbers + k, inputs(from + k));
    }
    compiler_barrier();
    return {held.data(), numbers};
}

template <typename W>
constexpr int64_t PIECE = sizeof(W) == 1 ? 128 : INT64_MAX;  // inputs: what is unpacked of four blocks fits the first cache

// Multiply the tokens of one tile with B blocks. `ahead`: the first block that is multiplied later, null for none.
template <int B, typename W>
inline void multiply_tile(const Packed<W>& weight, int64_t block, const uint16_t* x, const uint16_t* ahead, Sums* sums) {
    const int64_t in = weight.in, bytes = in * sizeof *x;
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (B > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t start = 0; start < in; start += std::min(PIECE<W>, in)) {
        const int64_t size = std::min(PIECE<W>, in - start);
        const auto [numbers, apart] = unpacked(weight, block, B, start, size);
        for (int64_t k = 0; k < size; k += TILE_INPUTS) {
            const uint16_t* w = numbers + k * LANES;
            if (ahead)
                for (int b = 0; b < B; ++b) fetch_tile(ahead + (b * in + start + k) * LANES);
            _tile_loadd(4, x + start + k, bytes);
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
    }
    _tile_stored(0, sums[0], LINE);
    if constexpr (B > 1) _tile_stored(1, sums[1], LINE);
    if constexpr (B > 2) {
        _tile_stored(2, sums[2], LINE);
        _tile_stored(3, sums[3], LINE);
    }
}

// Multiply the tokens of two tiles, from x and y on, with two blocks. sums: both blocks of the first tokens come first.
inline void multiply_tiles(Piece piece, int64_t in, const uint16_t* x, const uint16_t* y, const uint16_t* ahead, Sums* sums) {
    const int64_t bytes = in * sizeof *x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < in; k += TILE_INPUTS) {
        const uint16_t* w = piece.numbers + k * LANES;
        if (ahead)
            for (int b = 0; b < 2; ++b) fetch_tile(ahead + (b * in + k) * LANES);
        _tile_loadd(4, x + k, bytes);
        _tile_stream_loadd(6, w, LINE);  // read once: tokens stay in the first cache
        _tile_stream_loadd(7, w + piece.apart, LINE);
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

// The product of tokens with the blocks of a packed weight before `end`. Calls use(t, output, sums of LANES outputs).
template <typename W, typename Use>
struct TiledProduct {
    const Packed<W>& weight;
    const uint16_t* x;
    int64_t end;
    Use use;
    const float* first_sums;  // [tokens], of codes: see `Packed::first_sum`
    Sums* sums;               // [4]
    int64_t rows[2] = {-1, -1};

    void configure(int64_t first, int64_t second) {
        if (rows[0] == first && rows[1] == second) return;
        rows[0] = first;
        rows[1] = second;
        configure_tiles(int(first), int(second));
    }

    const uint16_t* token(int64_t t) const { return x + t * weight.in; }

    // What to fetch while earlier blocks are multiplied. Codes are in the cache.
    const uint16_t* ahead(int64_t block) const {
        return sizeof(W) == 2 && block < end ? (const uint16_t*)weight.block(block) : nullptr;
    }

    void hand_over(const Sums& own, int64_t block, int64_t first, int64_t count) {
        const int64_t output = block * LANES;
        for (int64_t t = 0; t < count; ++t) {
            Vec found = load(own[t]);
            if constexpr (sizeof(W) == 1) found += all_of(first_sums[first + t]);
            use(first + t, output, weight.scaled(found, output));
        }
    }

    template <int B>
    void one_tile(int64_t block, int64_t first, int64_t count) {
        configure(count, 0);
        multiply_tile<B>(weight, block, token(first), ahead(block + B), sums);
        for (int b = 0; b < B; ++b) hand_over(sums[b], block + b, first, count);
    }

    // All tokens with two blocks, in even parts of two tiles at most.
    void two_tiles(int64_t block, int64_t all) {
        const int64_t parts = (all + 2 * TILE_ROWS - 1) / (2 * TILE_ROWS), most = (all + parts - 1) / parts;
        const Piece piece = unpacked(weight, block, 2, 0, weight.in);
        for (int64_t start = 0; start < all; start += most) {
            const int64_t count = std::min(most, all - start), first = (count + 1) / 2, second = count - first;
            const uint16_t* y = token(second ? start + first : start);
            configure(first, second);
            multiply_tiles(piece, weight.in, token(start), y, start ? nullptr : ahead(block + 2), sums);
            for (int b = 0; b < 2; ++b) hand_over(sums[b], block + b, start, first);
            for (int b = 0; b < 2; ++b) hand_over(sums[2 + b], block + b, start + first, second);
        }
    }

    void run(int64_t block, int64_t all) {
        if (all > TILE_ROWS) {
            for (; block + 2 <= end; block += 2) two_tiles(block, all);
            for (int64_t start = 0; block < end && start < all; start += TILE_ROWS)
                one_tile<1>(block, start, std::min<int64_t>(TILE_ROWS, all - start));
        } else {
            for (; block + 4 <= end; block += 4) one_tile<4>(block, 0, all);
            for (; block + 2 <= end; block += 2) one_tile<2>(block, 0, all);
            for (; block < end; ++block) one_tile<1>(block, 0, all);
        }
    }
};

// The product of all tokens with the blocks of one thread, as `own_blocks`.
template <typename W, typename Use>
void tiled_blocks(const Packed<W>& weight, int64_t begin, int64_t end, const uint16_t* x, int64_t tokens, Use use) {
    if (begin == end) return;
    static thread_local std::vector<float> first_sums;
    if constexpr (sizeof(W) == 1) {
        if (int64_t(first_sums.size()) < tokens) first_sums.resize(tokens);
        for (int64_t t = 0; t < tokens; ++t) first_sums[t] = weight.first_sum(x + t * weight.in)[0];
    }
    alignas(LINE) Sums sums[4];
    TiledProduct<W, Use>{weight, x, end, use, first_sums.data(), sums}.run(begin, tokens);
    _tile_release();
}

// As tiles do while it exists, the thread takes numbers that are too small to be normal for zero.
struct SmallIsZero {
    unsigned before = _mm_getcsr();
    SmallIsZero() { _mm_setcsr(before | 0x8040); }
    ~SmallIsZero() { _mm_setcsr(before); }
};

#else

constexpr bool TILES = false;
constexpr int TILE_ROWS = 0;

inline bool may_use_tiles() { return false; }

struct SmallIsZero {};

#endif

}  // namespace
