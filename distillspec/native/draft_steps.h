// Steps of a draft loop: each reads the newest token of every row, and chooses the next one.

#pragma once

#include "layers.h"

namespace {

// As in models/draft_steps.py. N rows, S steps, at most W tokens a step.
struct Steps {
    int64_t rows, steps, most, total;  // total: tokens of a row over all steps
    const int64_t *slots, *ends;       // [N]: a row's slot, and the place of its newest token
    int64_t max_len;
    const int64_t* widths;   // [S]: tokens to choose, siblings
    const void* embeddings;  // [V, D] of T
    const void* projection;  // of normed states that are added to embeddings, null for none
    int64_t joined;          // 1: states stand beside embeddings
    const float* norm;       // [D], before the head
    const void* head;        // packed
    int64_t width, padded;   // columns of the head, and with those that only fill its last block
    const int64_t* ids;      // [width]: the token of each column, null: the same number
    const float* temperatures;  // [N], null: all rows are greedy
    const uint8_t* greedy;      // [N], null: none is
    const double* uniforms;     // [N, S, W] in [0, 1)
    void* carried;              // [N, D] of T: the state behind the newest token
    int64_t* newest;            // [N]
    int64_t* chosen;            // [N, total], −1 where there is no further token
    uint8_t* finite;            // [N, S]
    float* probs;               // [N, S, width], null if all rows are greedy
};

// Turn logits into probabilities at a temperature. `top` is the largest of them.
inline void soften(const float* logits, int64_t width, float top, float temperature, float* probs) {
    double sum = 0;
    for (int64_t c = 0; c < width; c += LANES) {
        const int64_t some = std::min<int64_t>(LANES, width - c);
        float part[LANES];
        for (int i = 0; i < LANES; ++i) part[i] = i < some ? (logits[c + i] - top) / temperature : LOWEST;
        const Vec e = exponential(load(part));
        store(e, part);
        for (int i = 0; i < some; ++i) {
            probs[c + i] = part[i];
            sum += part[i];
        }
    }
    const float share = 1 / sum;
    for (int64_t c = 0; c < width; ++c) probs[c] *= share;
}

// Return the first column at which the mass exceeds `level` of the whole, −1 without any mass. Columns in `without` have none.
inline int64_t drawn(const float* probs, int64_t width, double level, const int64_t* without, int count) {
    const auto there = [&](int64_t c) { return std::find(without, without + count, c) == without + count; };
    double sum = 0, total = 0;
    for (int64_t c = 0; c < width; ++c) total += probs[c];
    for (int i = 0; i < count; ++i) total -= probs[without[i]];
    int64_t last = -1;
    for (int64_t c = 0; c < width; ++c) {
        if (probs[c] <= 0 || !there(c)) continue;
        sum += probs[c];
        last = c;
        if (sum > level * total) break;
    }
    return last;
}

inline int64_t largest_of(const float* logits, int64_t width, const int64_t* without, int count) {
    int64_t best = -1;
    for (int64_t c = 0; c < width; ++c)
        if ((best < 0 || logits[c] > logits[best]) && std::find(without, without + count, c) == without + count) best = c;
    return best;
}

// Choose the tokens of one row in one step, from its logits `[width]`.
template <typename T>
void choose(const Steps& s, int64_t row, int64_t step, int64_t first, const float* logits) {
    float top = logits[0];
    bool sound = true;
    for (int64_t c = 0; c < s.width; ++c) {
        top = std::max(top, logits[c]);
        sound &= logits[c] == logits[c];
    }
    sound &= std::isfinite(top);
    s.finite[row * s.steps + step] = sound;
    float* probs = s.probs ? s.probs + (row * s.steps + step) * s.width : nullptr;
    const bool greedy = !s.temperatures || (s.greedy && s.greedy[row]);
    if (probs) soften(logits, s.width, top, greedy ? 1.0f : s.temperatures[row], probs);
    std::vector<int64_t> columns;
    for (int64_t i = 0; i < s.widths[step]; ++i) {
        const double level = s.uniforms ? s.uniforms[(row * s.steps + step) * s.most + i] : 0;
        const int count = int(columns.size());
        const int64_t column = !sound   ? 0
                               : greedy ? largest_of(logits, s.width, columns.data(), count)
                                        : drawn(probs, s.width, level, columns.data(), count);
        int64_t* to = s.chosen + row * s.total + first + i;
        if (column < 0) {
            *to = -1;
            continue;
        }
        columns.push_back(column);
        *to = s.ids ? s.ids[column] : column;
    }
    s.newest[row] = std::max<int64_t>(0, s.chosen[row * s.total + first]);
}

template <typename T, typename W>
void run_steps(const Layer* layers, int64_t count, const Model& m, const Steps& s, float eps, float state_eps, float scale,
               int threads) {
    static thread_local Space<T> own;
    own.fit(m, s.rows);
    Space<T>& space = own;
    const int64_t in = s.joined ? 2 * m.width : m.width, width = m.width;
    std::vector<T> input(s.rows * in);
    std::vector<Number<T>> normed(s.rows * width);
    std::vector<float> logits(s.rows * s.padded), added(s.projection ? s.rows * width : 0);
    const std::vector<float> ones(width, 1.0f);
    std::vector<int64_t> places(s.rows), positions(s.rows), nodes(s.rows, 1), row(5 * s.rows);
    const Batch batch{s.rows, s.rows, s.slots, places.data(), positions.data(), nodes.data(), row.data()};
    const T* embeddings = (const T*)s.embeddings;
    T* carried = (T*)s.carried;
    const float* hidden = own.hidden.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t step = 0, first = 0; step < s.steps; first += s.widths[step++]) {
#pragma omp single
        for (int64_t r = 0; r < s.rows; ++r) {
            const int64_t place = std::min(s.ends[r] + step, s.max_len);
            places[r] = place;
            positions[r] = std::min(place, s.max_len - 1);
            const int64_t numbers[5] = {r, 1, s.slots[r], place, place + (place < s.max_len)};
            std::copy(numbers, numbers + 5, row.data() + 5 * r);
            std::copy(embeddings + s.newest[r] * width, embeddings + (s.newest[r] + 1) * width, input.data() + r * in);
            if (s.joined) std::copy(carried + r * width, carried + (r + 1) * width, input.data() + r * in + width);
        }
        if (s.projection) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < s.rows; ++r)
                norm(carried + r * width, ones.data(), width, state_eps, normed.data() + r * width);
            product((const W*)s.projection, width, width, normed.data(), s.rows,
                    [&](int64_t t, int64_t o, Vec sums) { store(sums, added.data() + t * width + o); });
#pragma omp for schedule(static)
            for (int64_t r = 0; r < s.rows; ++r)
                for (int64_t c = 0; c < width; c += LANES) {
                    T* to = input.data() + r * in + c;
                    store(load(to) + load(added.data() + r * width + c), to);
                }
        }
        for (int64_t i = 0; i < count; ++i)
            if (i == 0) run_layer<T, W>(layers[i], m, batch, input.data(), in, eps, scale, space);
            else run_layer<T, W>(layers[i], m, batch, hidden, width, eps, scale, space);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; ++r) {
            for (int64_t c = 0; c < width; c += LANES) store(load(hidden + r * width + c), carried + r * width + c);
            norm(hidden + r * width, s.norm, width, eps, normed.data() + r * width);
        }
        product((const W*)s.head, s.padded, width, normed.data(), s.rows,
                [&](int64_t t, int64_t o, Vec sums) { store(sums, logits.data() + t * s.padded + o); });
#pragma omp for schedule(static)
        for (int64_t r = 0; r < s.rows; ++r) choose<T>(s, r, step, first, logits.data() + r * s.padded);
    }
}

}  // namespace
