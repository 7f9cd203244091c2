// A draft loop: it reads what is new of every row's text, and chooses tokens step by step, each behind the one before.

#pragma once

#include "distributions.h"
#include "draft_input.h"

namespace {

// As in models/draft_steps.py. R rows, S steps, at most W tokens a step.
struct Steps {
    int64_t steps, most, total;  // total: tokens of a row over all steps
    int64_t max_len;
    const int64_t* widths;  // [S]: tokens to choose, siblings
    Entry entry;
    const float* norm;           // [D], before the head
    const void* head;            // packed
    int64_t width, padded;       // columns of the head, and with those that only fill its last block
    const int64_t* ids;          // [width]: the token of each column, null: the same number
    const float* temperatures;   // [R], null: all rows are greedy
    const uint8_t* greedy;       // [R], null: none is
    const double* uniforms;      // [R, S, W] in [0, 1)
    const int64_t *text, *before;  // [N]: tokens to read first, and the addresses of the target's states before them
    int64_t* chosen;             // [R, total], −1 where there is no further token
    uint8_t* finite;             // [R, S]
    float* probs;                // [R, S, width], null if all rows are greedy
};

// Draw a column by `left`, which is zero where a sibling was drawn before. −1: nothing is left.
inline int64_t draw_from(const std::vector<float>& left, double uniform, std::vector<double>& blocks) {
    const double mass = mass_of(left.data(), left.size(), blocks.data());
    return mass > 0 ? drawn(left.data(), left.size(), blocks.data(), mass, uniform) : -1;
}

// Choose the tokens of one row in one step, from its logits `[width]`. Return the first of them.
inline int64_t choose(const Steps& s, int64_t row, int64_t step, int64_t first, const float* logits) {
    int64_t best;
    const float peak = peak_of(logits, s.width, best);
    const bool sound = std::isfinite(peak), greedy = !s.temperatures || (s.greedy && s.greedy[row]);
    int64_t* to = s.chosen + row * s.total + first;
    s.finite[row * s.steps + step] = sound;
    float* probs = s.probs ? s.probs + (row * s.steps + step) * s.width : nullptr;
    if (probs) {
        const double mass = weigh(Rows<float>{logits, s.width, s.width, &peak}, 0, greedy ? 1.0 : s.temperatures[row], probs);
        const float share = 1 / mass;
        for (int64_t c = 0; c < s.width; ++c) probs[c] *= share;
    }
    if (!sound) {
        std::fill(to, to + s.widths[step], s.ids ? s.ids[0] : 0);
        return to[0];
    }
    std::vector<float> left(greedy ? logits : probs, (greedy ? logits : probs) + s.width);
    std::vector<double> blocks((s.width + BLOCK - 1) / BLOCK);
    for (int64_t i = 0; i < s.widths[step]; ++i) {
        int64_t column = best;
        if (!greedy) column = draw_from(left, s.uniforms[(row * s.steps + step) * s.most + i], blocks);
        else if (i > 0 && !std::isfinite(peak_of(left.data(), s.width, column))) column = -1;
        to[i] = column < 0 ? -1 : s.ids ? s.ids[column] : column;
        if (column >= 0) left[column] = greedy ? -std::numeric_limits<float>::infinity() : 0;
    }
    return std::max<int64_t>(0, to[0]);
}

template <typename T, typename W>
void run_steps(const Layer* layers, int64_t count, const Model& m, const Batch& text, const Steps& s, float eps,
               float state_eps, float scale, int threads) {
    const int64_t rows = text.rows, width = m.width, in = s.entry.joined() ? 2 * width : width;
    static thread_local Space<T> own;
    own.fit(m, std::max(text.tokens, rows));
    Space<T>& space = own;
    EntrySpace<T> entry(s.entry, width, std::max(text.tokens, rows));
    std::vector<Number<T>> normed(rows * width);
    std::vector<float> logits(rows * s.padded);
    std::vector<int64_t> slots(rows), places(rows), positions(rows), nodes(rows, 1), row(5 * rows), newest(rows), last(rows);
    const Batch next{rows, rows, slots.data(), places.data(), positions.data(), nodes.data(), row.data()};
    for (int64_t r = 0; r < rows; ++r) {
        last[r] = text.row[5 * r] + text.row[5 * r + 1] - 1;
        slots[r] = text.row[5 * r + 2];
    }
    const float* hidden = own.hidden.data();
    const auto run_layers = [&](const Batch& batch) {
        for (int64_t i = 0; i < count; ++i)
            if (i == 0) run_layer<T, W>(layers[i], m, batch, entry.input.data(), in, eps, scale, space);
            else run_layer<T, W>(layers[i], m, batch, hidden, width, eps, scale, space);
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t step = 0, first = 0; step < s.steps; first += s.widths[step++]) {
        if (step == 0) {
            if (s.entry.fusion) fuse<T, W>(s.entry, width, s.before, text.tokens, entry);
            enter<T, W>(s.entry, width, s.text, text.tokens, state_eps, entry);
            run_layers(text);
        } else {
#pragma omp single
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t place = std::min(text.places[last[r]] + step, s.max_len);
                places[r] = place;
                positions[r] = std::min(place, s.max_len - 1);
                const int64_t numbers[5] = {r, 1, slots[r], place, place + (place < s.max_len)};
                std::copy(numbers, numbers + 5, row.data() + 5 * r);
            }
            enter<T, W>(s.entry, width, newest.data(), rows, state_eps, entry);
            run_layers(next);
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) {
            const float* state = hidden + (step ? r : last[r]) * width;
            if (s.entry.fusion)
                for (int64_t c = 0; c < width; c += LANES) store(load(state + c), entry.fed.data() + r * width + c);
            norm(state, s.norm, width, eps, normed.data() + r * width);
        }
        product((const W*)s.head, s.padded, width, normed.data(), rows,
                [&](int64_t t, int64_t o, Vec sums) { store(sums, logits.data() + t * s.padded + o); });
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) newest[r] = choose(s, r, step, first, logits.data() + r * s.padded);
    }
}

}  // namespace
