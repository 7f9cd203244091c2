// Attention of few queries a row over the keys of its slot, on CPUs. Called by few_queries.py. Each row reads its own keys
// alone, whatever the others hold.

#include "attention.h"

namespace {

// As in models/few_queries.py. Strides count numbers.
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
    const int64_t size = pairs >= 2 * threads ? all : TILES && may_use_tiles() ? TILE_ROWS : ROWS, parts = (all + size - 1) / size;
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
        const int64_t offset = slot * shape.slot + h * shape.head;
        const auto head = [&](int64_t r) { return h * groups + (begin + r) / real; };
        const auto token = [&](int64_t r) { return (begin + r) % real; };
        attend_some<T, T>(
            keys + offset, values + offset, shape.place, base, end, dim, count, scale,
            [&](int64_t r) {
                return query + b * shape.query_row + head(r) * shape.query_head + token(r) * shape.query_token;
            },
            [&](int64_t r) { return out + ((b * queries + token(r)) * shape.heads + head(r)) * dim; },
            [&](int64_t r) { return Query{int(first[token(r)]), int(end), uint64_t(nodes[token(r)])}; });
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
