// Attention of few queries a row over the keys of its slot, on CPUs. Called by few_queries.py.
//
// Scores, weights and sums are float32. Each row reads its own keys alone, whatever the others hold. GCC's vector
// types are used, so that one text serves AVX-512, AVX2 and NEON.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int ROWS = 4;             // queries that share each load of a key or value
constexpr int KEYS = LANES / ROWS;  // keys of a tile: its scores fill one vector
constexpr int BLOCK = 64;           // keys whose scores are known before their values are read
constexpr int COLUMNS = LANES / 4;  // vectors of a value whose sums stay in registers
constexpr float LOWEST = -1e30f;    // score of a key that is not seen
constexpr float SMALLEST = -87.0f;  // e^x is 0 below

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Vec load(const uint16_t* from) {  // bfloat16: the upper half of a float32
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Vec)(__builtin_convertvector(x, Words) << 16);
}

inline void store(Vec x, float* to) { std::memcpy(to, &x, sizeof x); }

inline void store(Vec x, uint16_t* to) {  // rounds to the nearest, ties to even
    const Words bits = (Words)x, rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, nan = Words{} + 0x7FC0;
    const Halves y = __builtin_convertvector(x == x ? rounded : nan, Halves);
    std::memcpy(to, &y, sizeof y);
}

// e^x of x <= 0, with a relative error of 2e-7.
inline Vec exponential(Vec x) {
    const Vec y = (x < SMALLEST ? Vec{} + SMALLEST : x) * 1.44269504088896341f;
    const Ints whole = __builtin_convertvector(y - 0.5f, Ints);
    const Vec t = (y - __builtin_convertvector(whole, Vec)) * 0.693147180559945309f;
    Vec e = 8.3333338e-3f + t * 1.3888889e-3f;  // Taylor's polynomial, |t| <= 0.35
    e = 4.1666668e-2f + t * e;
    e = 1.6666667e-1f + t * e;
    e = 0.5f + t * e;
    e = 1.0f + t * (1.0f + t * e);
    return x < SMALLEST ? Vec{} : e * (Vec)((whole + 127) << 23);
}

inline float exponential(float x) { return exponential(Vec{} + x)[0]; }

// Lane i of the result is the sum of the lanes of parts[i], of N parts. Halves are added first.
template <int N>
inline Vec sums(const Vec* parts) {
    if constexpr (N == 1) {
        return parts[0];
    } else {
        const Vec a = sums<N / 2>(parts), b = sums<N / 2>(parts + N / 2);
        Ints low, high;
        for (int i = 0; i < LANES; ++i) {
            low[i] = (i % N < N / 2 ? 0 : LANES) + i / N * N + i % (N / 2);
            high[i] = low[i] + N / 2;
        }
        return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    }
}

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
    float *queries, *sum, *most, *total;  // [count, dim] scaled, [count, dim], [count] and [count]
    const Query* seen;

    // Read keys start ... start + size - 1, of which those from `base` on are new tokens.
    void read(int start, int size, int base) {
        for (int row = 0; row < count; row += ROWS) {
            alignas(64) float tiles[BLOCK][ROWS], weights[ROWS][BLOCK];
            for (int j = 0; j < size; j += KEYS) score(row, start + j, std::min(KEYS, size - j), tiles[j]);
            const int rows = std::min(ROWS, count - row);
            for (int r = 0; r < ROWS; ++r) {
                float* own = weights[r];
                for (int j = 0; j < size; ++j) own[j] = tiles[j][r];
                std::fill(own + size, own + BLOCK, LOWEST);
                if (r < rows) {
                    hide(own, row + r, start, size, base);
                    soften(own, row + r);
                }
            }
            for (int c = 0; c < dim; c += COLUMNS * LANES) {
                const int vectors = std::min(COLUMNS, (dim - c) / LANES);
                if (vectors == COLUMNS) mix<COLUMNS>(weights, start, size, row, rows, c);
                else for (int i = 0; i < vectors; ++i) mix<1>(weights, start, size, row, rows, c + i * LANES);
            }
        }
    }

    // Write the scores of ROWS queries with KEYS keys, of which `size` exist, to `out [KEYS, ROWS]`.
    void score(int row, int key, int size, float* out) {
        Vec parts[LANES] = {};
        for (int c = 0; c < dim; c += LANES) {
            Vec q[ROWS];
            for (int r = 0; r < ROWS; ++r) q[r] = load(queries + std::min(row + r, count - 1) * dim + c);
            for (int j = 0; j < KEYS; ++j) {
                const Vec k = load(keys + (key + std::min(j, size - 1)) * stride + c);
                for (int r = 0; r < ROWS; ++r) parts[j * ROWS + r] += q[r] * k;
            }
        }
        store(sums<LANES>(parts), out);
    }

    void hide(float* scores, int row, int start, int size, int base) {
        const Query& own = seen[row];
        for (int j = 0; j < std::min(size, own.first - start); ++j) scores[j] = LOWEST;
        for (int j = std::max(0, base - start); j < size; ++j)
            if (!(own.nodes >> (start + j - base) & 1)) scores[j] = LOWEST;
    }

    // Turn scores into weights relative to the largest score so far, and what was summed before to the same.
    void soften(float* scores, int row) {
        Vec top = load(scores), all = {};
        for (int j = LANES; j < BLOCK; j += LANES) {
            const Vec x = load(scores + j);
            top = x > top ? x : top;
        }
        float best = most[row];
        for (int i = 0; i < LANES; ++i) best = std::max(best, top[i]);
        for (int j = 0; j < BLOCK; j += LANES) {
            const Vec e = exponential(load(scores + j) - best);
            store(e, scores + j);
            all += e;
        }
        const float shrink = exponential(most[row] - best);
        most[row] = best;
        total[row] *= shrink;
        for (int i = 0; i < LANES; ++i) total[row] += all[i];
        if (shrink == 1) return;
        for (float* own = sum + row * dim; own < sum + (row + 1) * dim; own += LANES) store(load(own) * shrink, own);
    }

    template <int W>
    void mix(const float (*weights)[BLOCK], int start, int size, int row, int rows, int column) {
        Vec sums[ROWS][W] = {};
        for (int j = 0; j < size; ++j) {
            Vec v[W];
            for (int i = 0; i < W; ++i) v[i] = load(values + (start + j) * stride + column + i * LANES);
            for (int r = 0; r < ROWS; ++r)
                for (int i = 0; i < W; ++i) sums[r][i] += weights[r][j] * v[i];
        }
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < W; ++i) {
                float* own = sum + (row + r) * dim + column + i * LANES;
                store(load(own) + sums[r][i], own);
            }
    }
};

// As in few_queries.py. Strides count numbers.
struct Shape {
    int64_t batch, heads, queries, dim, kv_heads;
    int64_t query_row, query_head, query_token;
    int64_t slot, head, place;
};

template <typename T>
void attend(const T* query, const T* keys, const T* values, T* out, const int64_t* rows, const Shape& shape,
            float scale, int threads) {
    const int64_t groups = shape.heads / shape.kv_heads, queries = shape.queries, dim = shape.dim;
    const int64_t all = groups * queries, pairs = shape.batch * shape.kv_heads;
    // Too few heads for the threads: each takes a part of a head's queries, and reads the keys once more.
    const int64_t size = pairs < 2 * threads ? ROWS : all, parts = (all + size - 1) / size;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t item = 0; item < pairs * parts; ++item) {
        const int64_t b = item / parts / shape.kv_heads, h = item / parts % shape.kv_heads;
        const int64_t* row = rows + b * (3 + 2 * queries);
        const int64_t slot = row[0], base = row[1], end = row[2], *first = row + 3, *nodes = first + queries;
        const int64_t real = end - base;  // the rest is padding, which costs nothing
        const int64_t begin = item % parts * size, count = std::min(size, groups * real - begin);
        if (begin == 0)
            for (int64_t t = real; t < queries; ++t) {
                T* own = out + ((b * queries + t) * shape.heads + h * groups) * dim;
                std::fill(own, own + groups * dim, T{});
            }
        if (count <= 0) continue;
        std::vector<float> space(2 * count * dim + 2 * count);
        std::vector<Query> seen(count);
        float *scaled = space.data(), *sum = scaled + count * dim, *most = sum + count * dim, *total = most + count;
        int64_t start = end;
        for (int64_t r = 0; r < count; ++r) {
            const int64_t head = h * groups + (begin + r) / real, t = (begin + r) % real;
            const T* own = query + b * shape.query_row + head * shape.query_head + t * shape.query_token;
            for (int64_t c = 0; c < dim; c += LANES) store(load(own + c) * scale, scaled + r * dim + c);
            seen[r] = {int(first[t]), uint64_t(nodes[t])};
            start = std::min(start, first[t]);
            most[r] = LOWEST;
        }
        const int64_t offset = slot * shape.slot + h * shape.head;
        Head<T> part{keys + offset, values + offset, shape.place, int(dim), int(count),
                     scaled, sum, most, total, seen.data()};
        for (; start < end; start += BLOCK)
            part.read(int(start), int(std::min<int64_t>(BLOCK, end - start)), int(base));
        for (int64_t r = 0; r < count; ++r) {
            const int64_t head = h * groups + (begin + r) / real, t = (begin + r) % real;
            T* own = out + ((b * queries + t) * shape.heads + head) * dim;
            for (int64_t c = 0; c < dim; c += LANES) store(load(sum + r * dim + c) / total[r], own + c);
        }
    }
}

}  // namespace

#define EXPORTED(name, type)                                                                                       \
    extern "C" void name(const void* query, const void* keys, const void* values, void* out, const int64_t* rows,  \
                         const int64_t* shape, float scale, int threads) {                                         \
        attend((const type*)query, (const type*)keys, (const type*)values, (type*)out, rows, *(const Shape*)shape, \
               scale, threads);                                                                                    \
    }

EXPORTED(attend_float32, float)
EXPORTED(attend_bfloat16, uint16_t)

extern "C" int lanes() { return LANES; }
