// The layers of a small Llama over few tokens of many rows, on CPUs, in one call. Called by few_tokens.py.
//
// Weights have 16 bits: bfloat16 for models in bfloat16, float16 for those in float32. They are packed so that a vector
// holds the same input (or two neighbouring ones) of LANES outputs. Sums are float32. Activations are bfloat16 where the
// processor multiplies pairs of bfloat16 and the model is in it, else float32.

#include <cmath>
#include <type_traits>

#include "attention.h"

namespace {

#if defined(__AVX512BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif

constexpr int MOST = 8;    // tokens that one read of a weight serves
constexpr int BLOCKS = 4;  // of LANES outputs, that are computed together

// As in few_tokens.py.
struct Layer {
    const void *qkv, *out, *gate_up, *down;  // packed, of Weight<T>
    const float *first_norm, *state_norm, *post_norm;  // state_norm: of the second half of the input, null for none
    void *keys, *values;
    int64_t slot, head, place;  // strides of both, in numbers
};

struct Model {
    int64_t width, inner, heads, kv_heads, dim;
    const float *cosines, *sines;  // [positions, dim]
};

struct Batch {
    int64_t tokens, rows;
    const int64_t *slots, *places, *positions, *nodes;  // [tokens]; nodes: bit i: it sees new token i of its row
    const int64_t* row;                                 // [rows, 5]: first token, tokens, slot, first new place, end
};

// Hidden states that are kept. columns[i]: where those after i layers begin among a token's states, −1 for none.
struct States {
    void* held;
    int64_t slot, place;  // strides, in numbers
    const int64_t* columns;
};

template <typename T>
constexpr bool BY_PAIRS = UNITS && sizeof(T) == 2;

template <typename T>
using Number = std::conditional_t<BY_PAIRS<T>, uint16_t, float>;  // of activations

template <typename T>
using Weight = std::conditional_t<sizeof(T) == 2, uint16_t, Half>;

// sums[b][t] += block b of a packed weight times token t. `x` has `in` numbers a token.
template <int B, int N>
inline void multiply(const uint16_t* weight, int64_t in, const uint16_t* x, Vec (&sums)[B][N]) {
#if defined(__AVX512BF16__)
    for (int64_t k = 0; k < in; k += 2) {
        Pairs w[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) w[b] = pairs(weight + b * in * LANES + k * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
            int32_t both;
            std::memcpy(&both, x + t * in + k, sizeof both);
            const Pairs xs = _mm512_set1_epi32(both);
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[b][t] = add_products(sums[b][t], xs, w[b]);
        }
    }
#endif
}

template <int B, int N, typename W>
inline void multiply(const W* weight, int64_t in, const float* x, Vec (&sums)[B][N]) {
    for (int64_t k = 0; k < in; ++k) {
        Vec w[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; ++b) w[b] = load(weight + b * in * LANES + k * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < N; ++t) {
            const Vec xs = Vec{} + x[t * in + k];
#pragma GCC unroll 8
            for (int b = 0; b < B; ++b) sums[b][t] += xs * w[b];
        }
    }
}

// Call use(t, output, sums of LANES outputs from `output` on) for each token t and B blocks from `block` on.
template <int B, int N, typename W, typename X, typename Use>
void blocks_of(const W* weight, int64_t in, int64_t block, const X* x, int64_t first, Use use) {
    Vec sums[B][N] = {};
    multiply<B, N>(weight + block * in * LANES, in, x + first * in, sums);
    for (int t = 0; t < N; ++t)
        for (int b = 0; b < B; ++b) use(first + t, (block + b) * LANES, sums[b][t]);
}

template <int B, typename W, typename X, typename Use>
void some_blocks(const W* weight, int64_t in, int64_t block, const X* x, int64_t first, int64_t count, Use use) {
    switch (count) {
        case 1: return blocks_of<B, 1>(weight, in, block, x, first, use);
        case 2: return blocks_of<B, 2>(weight, in, block, x, first, use);
        case 3: return blocks_of<B, 3>(weight, in, block, x, first, use);
        case 4: return blocks_of<B, 4>(weight, in, block, x, first, use);
        case 5: return blocks_of<B, 5>(weight, in, block, x, first, use);
        case 6: return blocks_of<B, 6>(weight, in, block, x, first, use);
        case 7: return blocks_of<B, 7>(weight, in, block, x, first, use);
        default: return blocks_of<B, 8>(weight, in, block, x, first, use);
    }
}

// The product of all tokens with a packed weight `[out, in]`, shared by the threads of a parallel region.
template <typename W, typename X, typename Use>
void product(const W* weight, int64_t out, int64_t in, const X* x, int64_t tokens, Use use) {
    const int64_t blocks = out / LANES;
#pragma omp for schedule(static)
    for (int64_t part = 0; part < (blocks + BLOCKS - 1) / BLOCKS; ++part)
        for (int64_t first = 0; first < tokens; first += MOST) {
            const int64_t count = std::min<int64_t>(MOST, tokens - first), block = part * BLOCKS;
            if (count <= 4 && block + BLOCKS <= blocks) {
                some_blocks<BLOCKS>(weight, in, block, x, first, count, use);
                continue;
            }
            const int64_t end = std::min(block + BLOCKS, blocks);
            for (int64_t b = block; b < end; b += 2)
                if (b + 2 <= end) some_blocks<2>(weight, in, b, x, first, count, use);
                else some_blocks<1>(weight, in, b, x, first, count, use);
        }
}

template <typename From, typename To>
void norm(const From* x, const float* weight, int64_t width, float eps, To* to) {
    Vec squares = {};
    for (int64_t c = 0; c < width; c += LANES) squares += load(x + c) * load(x + c);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for (int64_t c = 0; c < width; c += LANES) store(load(x + c) * scale * load(weight + c), to + c);
}

inline Vec silu(Vec x) {
    const Vec small = exponential(x < 0 ? x : -x);
    return x * (x < 0 ? small : Vec{} + 1.0f) / (1.0f + small);
}

// Turn one head by its position, and store it.
template <typename To>
void turn(const float* x, const float* cosines, const float* sines, int64_t dim, To* to) {
    const int64_t half = dim / 2;
    for (int64_t c = 0; c < half; c += LANES) {
        const Vec a = load(x + c), b = load(x + half + c);
        store(a * load(cosines + c) - b * load(sines + c), to + c);
        store(b * load(cosines + half + c) + a * load(sines + half + c), to + half + c);
    }
}

template <typename T>
struct Space {
    std::vector<Number<T>> normed, mixed, active;
    std::vector<float> hidden, qkv, gate;
    std::vector<T> queries;

    void fit(const Model& m, int64_t tokens) {
        const auto at_least = [](auto& held, int64_t size) {
            if (int64_t(held.size()) < size) held.resize(size);
        };
        at_least(normed, 2 * tokens * m.width);
        at_least(mixed, tokens * m.heads * m.dim);
        at_least(active, tokens * m.inner);
        at_least(hidden, tokens * m.width);
        at_least(qkv, tokens * (m.heads + 2 * m.kv_heads) * m.dim);
        at_least(gate, tokens * m.inner);
        at_least(queries, tokens * m.heads * m.dim);
    }
};

template <typename T>
void attention(const Layer& layer, const Model& m, const Batch& batch, float scale, Space<T>& space) {
    const int64_t dim = m.dim, groups = m.heads / m.kv_heads, all = (m.heads + 2 * m.kv_heads) * dim;
    T *keys = (T*)layer.keys, *values = (T*)layer.values;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.tokens; ++t) {
        const float* own = space.qkv.data() + t * all;
        const float *cosines = m.cosines + batch.positions[t] * dim, *sines = m.sines + batch.positions[t] * dim;
        for (int64_t h = 0; h < m.heads; ++h)
            turn(own + h * dim, cosines, sines, dim, space.queries.data() + (t * m.heads + h) * dim);
        for (int64_t h = 0; h < m.kv_heads; ++h) {
            const int64_t at = batch.slots[t] * layer.slot + h * layer.head + batch.places[t] * layer.place;
            turn(own + (m.heads + h) * dim, cosines, sines, dim, keys + at);
            const float* value = own + (m.heads + m.kv_heads + h) * dim;
            for (int64_t c = 0; c < dim; c += LANES) store(load(value + c), values + at + c);
        }
    }
    const int64_t pairs = batch.rows * m.kv_heads;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < pairs; ++item) {
        const int64_t *row = batch.row + item / m.kv_heads * 5, h = item % m.kv_heads;
        const int64_t first = row[0], count = row[1], base = row[3], end = row[4], real = end - base;
        for (int64_t t = first + std::max<int64_t>(real, 0); t < first + count; ++t) {
            auto* own = space.mixed.data() + (t * m.heads + h * groups) * dim;
            std::fill(own, own + groups * dim, Number<T>{});
        }
        if (real <= 0) continue;
        const int64_t offset = row[2] * layer.slot + h * layer.head;
        const auto place = [&](int64_t r) { return ((first + r % real) * m.heads + h * groups + r / real) * dim; };
        attend_some<T, Number<T>>(
            keys + offset, values + offset, layer.place, base, end, dim, groups * real, scale,
            [&](int64_t r) { return space.queries.data() + place(r); },
            [&](int64_t r) { return space.mixed.data() + place(r); },
            [&](int64_t r) { return Query{0, uint64_t(batch.nodes[first + r % real])}; });
    }
}

// One layer. Its input is `[tokens, in]` of From: the residual, or embeddings and states side by side.
template <typename T, typename From>
void run_layer(const Layer& layer, const Model& m, const Batch& batch, const From* input, int64_t in, float eps,
               float scale, Space<T>& space) {
    const int64_t width = m.width, qkv = (m.heads + 2 * m.kv_heads) * m.dim, tokens = batch.tokens;
    float* hidden = space.hidden.data();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const From* own = input + t * in;
        auto* to = space.normed.data() + t * in;
        norm(own, layer.first_norm, width, eps, to);
        if (layer.state_norm) norm(own + width, layer.state_norm, width, eps, to + width);
        const From* residual = own + in - width;
        if ((const void*)residual != (const void*)(hidden + t * width))
            for (int64_t c = 0; c < width; c += LANES) store(load(residual + c), hidden + t * width + c);
    }
    product((const Weight<T>*)layer.qkv, qkv, in, space.normed.data(), tokens,
            [&](int64_t t, int64_t o, Vec sums) { store(sums, space.qkv.data() + t * qkv + o); });
    attention(layer, m, batch, scale, space);
    const auto add = [&](int64_t t, int64_t o, Vec sums) {
        float* own = hidden + t * width + o;
        store(load(own) + sums, own);
    };
    product((const Weight<T>*)layer.out, width, m.heads * m.dim, space.mixed.data(), tokens, add);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
        norm(hidden + t * width, layer.post_norm, width, eps, space.normed.data() + t * width);
    // Blocks of gate and up take turns, so that a thread has both of an output.
    const auto gated = [&](int64_t t, int64_t o, Vec sums) {
        const int64_t at = t * m.inner + o / (2 * LANES) * LANES;
        if (o / LANES % 2 == 0) store(silu(sums), space.gate.data() + at);
        else store(load(space.gate.data() + at) * sums, space.active.data() + at);
    };
    product((const Weight<T>*)layer.gate_up, 2 * m.inner, width, space.normed.data(), tokens, gated);
    product((const Weight<T>*)layer.down, width, m.inner, space.active.data(), tokens, add);
}

template <typename T, typename From>
void keep(const States& states, int64_t after, const From* hidden, const Model& m, const Batch& batch) {
    if (!states.held || states.columns[after] < 0) return;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.tokens; ++t) {
        T* to = (T*)states.held + batch.slots[t] * states.slot + batch.places[t] * states.place + states.columns[after];
        for (int64_t c = 0; c < m.width; c += LANES) store(load(hidden + t * m.width + c), to + c);
    }
}

template <typename T>
void run(const Layer* layers, int64_t count, const Model& m, const Batch& batch, const States& states, const T* input,
         int64_t in, T* output, float eps, float scale, int threads) {
    static thread_local Space<T> own;
    own.fit(m, batch.tokens);
    Space<T>& space = own;
    const float* hidden = own.hidden.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        keep<T>(states, 0, input, m, batch);
        for (int64_t i = 0; i < count; ++i) {
            if (i == 0) run_layer<T>(layers[i], m, batch, input, in, eps, scale, space);
            else run_layer<T>(layers[i], m, batch, hidden, m.width, eps, scale, space);
            keep<T>(states, i + 1, hidden, m, batch);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < batch.tokens; ++t)
            for (int64_t c = 0; c < m.width; c += LANES) store(load(hidden + t * m.width + c), output + t * m.width + c);
    }
}

// y = x times a packed weight `[out, in]`.
template <typename T>
void multiply_all(const Weight<T>* weight, int64_t out, int64_t in, const T* x, int64_t tokens, T* y, int threads) {
    static thread_local std::vector<Number<T>> own;
    const Number<T>* read = (const Number<T>*)x;
    if constexpr (!std::is_same_v<T, Number<T>>) {
        own.resize(tokens * in + LANES);
        for (int64_t i = 0; i < tokens * in; i += LANES) {
            T some[LANES] = {};
            std::memcpy(some, x + i, std::min<int64_t>(LANES, tokens * in - i) * sizeof(T));
            store(load(some), own.data() + i);
        }
        read = own.data();
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    product(weight, out, in, read, tokens, [&](int64_t t, int64_t o, Vec sums) { store(sums, y + t * out + o); });
}

}  // namespace

#define EXPORTED(name, type)                                                                                          \
    extern "C" void name(const void* layers, int64_t count, const void* model, const void* batch, const void* states, \
                         const void* input, int64_t in, void* output, float eps, float scale, int threads) {          \
        run((const Layer*)layers, count, *(const Model*)model, *(const Batch*)batch, *(const States*)states,          \
            (const type*)input, in, (type*)output, eps, scale, threads);                                              \
    }

EXPORTED(layers_float32, float)
EXPORTED(layers_bfloat16, uint16_t)

#define PRODUCT(name, type)                                                                                       \
    extern "C" void name(const void* weight, int64_t out, int64_t in, const void* x, int64_t tokens, void* y,     \
                         int threads) {                                                                           \
        multiply_all<type>((const Weight<type>*)weight, out, in, (const type*)x, tokens, (type*)y, threads);      \
    }

PRODUCT(product_float32, float)
PRODUCT(product_bfloat16, uint16_t)

extern "C" int lanes() { return LANES; }
extern "C" int by_pairs() { return UNITS; }
