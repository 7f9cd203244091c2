// The layers of a small Llama over some tokens of many rows, for the threads of a parallel region.

#pragma once

#include <cmath>
#include <vector>

#include "attention.h"
#include "products.h"

namespace {

// As in models/packed_layer.py. What is lacking is null: `qkv`, `out` and `post_norm` of heads (`draft_heads.h`), and `gate_up`
// and all norms of Medusa's.
struct Layer {
    const void *qkv, *out, *gate_up, *down;  // packed, of W
    const float *first_norm, *state_norm, *post_norm;  // state_norm: of the second half of the input
    const float* scales;                               // [4]: of the sums of these products, for weights of 16 bits
    void *keys, *values;
    int64_t slot, head, place;  // strides of both, in numbers
};

struct Model {
    int64_t width, inner, heads, kv_heads, dim;
    const float *cosines, *sines;  // [positions, dim]
};

struct Batch {
    int64_t tokens, rows;
    const int64_t *slots, *places, *positions, *nodes;  // [tokens]; nodes: see `Query`
    const int64_t* row;                                 // [rows, 5]: first token, tokens, slot, first new place, end
    const int64_t* windows;                             // [rows]: the place of bit 0 of nodes, null: the first new one
};

// Hidden states that are kept. columns[i]: where those after i layers begin among a token's states, −1 for none.
struct States {
    void* held;
    int64_t slot, place;  // strides, in numbers
    const int64_t* columns;
};

template <typename From, typename To>
void norm(const From* x, const float* weight, int64_t width, float eps, To* to) {
    Vec squares = {};
    for (int64_t c = 0; c < width; c += LANES) squares += load(x + c) * load(x + c);
    const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
    for (int64_t c = 0; c < width; c += LANES) store(load(x + c) * scale * load(weight + c), to + c);
}

inline Vec silu(Vec x) {
    const Vec small = exponential(x < 0 ? x : -x);
    return x * (x < 0 ? small : all_of(1.0f)) / (1.0f + small);
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

constexpr int64_t PART = 32;  // tokens of a row whose attention is one thread's

template <typename T>
struct Space {
    Lines<Number<T>> normed, mixed, active;
    Lines<float> hidden, qkv, gate;
    Lines<T> queries;

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

// Attention of one key head over at most PART tokens of a row, from token `begin` of it on.
template <typename T>
void attend_part(const Layer& layer, const Model& m, const Batch& batch, int64_t number, int64_t head, int64_t begin,
                 float scale, Space<T>& space) {
    const int64_t *row = batch.row + 5 * number, window = batch.windows ? batch.windows[number] : row[3];
    const int64_t dim = m.dim, groups = m.heads / m.kv_heads, first = row[0] + begin, count = std::min(row[1] - begin, PART);
    const int64_t base = row[3], real = std::min(row[4] - base - begin, count);  // the rest has no keys
    if (count <= 0) return;
    for (int64_t t = first + std::max<int64_t>(real, 0); t < first + count; ++t) {
        auto* own = space.mixed.data() + (t * m.heads + head * groups) * dim;
        std::fill(own, own + groups * dim, Number<T>{});
    }
    if (real <= 0) return;
    const int64_t offset = row[2] * layer.slot + head * layer.head;
    const auto place = [&](int64_t r) { return ((first + r % real) * m.heads + head * groups + r / real) * dim; };
    attend_some<T, Number<T>>(
        (const T*)layer.keys + offset, (const T*)layer.values + offset, layer.place, window, base + begin + real, dim,
        groups * real, scale, [&](int64_t r) { return space.queries.data() + place(r); },
        [&](int64_t r) { return space.mixed.data() + place(r); },
        [&](int64_t r) {
            return Query{0, int(base + begin + r % real + 1), uint64_t(batch.nodes[first + r % real])};
        });
}

template <typename T>
void attention(const Layer& layer, const Model& m, const Batch& batch, float scale, Space<T>& space) {
    const int64_t dim = m.dim, all = (m.heads + 2 * m.kv_heads) * dim;
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
    int64_t longest = 0;
    for (int64_t i = 0; i < batch.rows; ++i) longest = std::max(longest, batch.row[5 * i + 1]);
    const int64_t parts = (longest + PART - 1) / PART;
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < batch.rows * m.kv_heads * parts; ++item) {
        const int64_t number = item / parts / m.kv_heads, head = item / parts % m.kv_heads;
        attend_part(layer, m, batch, number, head, item % parts * PART, scale, space);
    }
}

// What a product does with its sums: it adds them, scaled, to states `[tokens, width]`.
inline auto adding(float* hidden, int64_t width, float factor) {
    return [=](int64_t t, int64_t o, Vec sums) {
        float* own = hidden + t * width + o;
        store(load(own) + factor * sums, own);
    };
}

// One layer, with weights of W. Its input is `[tokens, in]` of From: the residual, or embeddings and states side by side.
template <typename T, typename W, typename From>
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
    product((const W*)layer.qkv, qkv, in, space.normed.data(), tokens,
            [&](int64_t t, int64_t o, Vec sums) { store(layer.scales[0] * sums, space.qkv.data() + t * qkv + o); });
    attention(layer, m, batch, scale, space);
    product((const W*)layer.out, width, m.heads * m.dim, space.mixed.data(), tokens,
            adding(hidden, width, layer.scales[1]));
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
        norm(hidden + t * width, layer.post_norm, width, eps, space.normed.data() + t * width);
    // Blocks of gate and up take turns, so that a thread has both of an output.
    const auto gated = [&](int64_t t, int64_t o, Vec sums) {
        const int64_t at = t * m.inner + o / (2 * LANES) * LANES;
        const Vec own = layer.scales[2] * sums;
        if (o / LANES % 2 == 0) store(silu(own), space.gate.data() + at);
        else store(load(space.gate.data() + at) * own, space.active.data() + at);
    };
    product((const W*)layer.gate_up, 2 * m.inner, width, space.normed.data(), tokens, gated);
    product((const W*)layer.down, width, m.inner, space.active.data(), tokens, adding(hidden, width, layer.scales[3]));
}

}  // namespace
