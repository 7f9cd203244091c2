// Trees of a draft: it reads what is new of every row's text, and chooses tokens level by level, each behind one before.

#pragma once

#include "distributions.h"
#include "draft_heads.h"
#include "draft_input.h"

namespace {

// A token that others are chosen behind: the newest of a row's text, or one that was chosen. The draft reads it first, but for
// a block's.
struct Reader {
    int64_t row;
    int64_t node, above;       // its place among the chosen tokens, and the reader before it. −1 for the text's
    int64_t first, children;   // tokens to choose behind it, siblings
    int64_t number;            // among the readers of its row, level by level, from the text's (0) on
    uint64_t seen;             // bit i: it sees reader i + 1 of its row
};

// As in models/draft_steps.py. R rows, S readers, at most W siblings.
struct Steps {
    int64_t levels, readers, most, draws;  // draws: readers of a row that `uniforms` has numbers for
    int64_t max_len;
    const int64_t* level;    // [levels + 1]: the first reader of each
    const Reader* reader;    // [S], level by level, and row by row in it
    Entry entry;
    const float* norm;           // [D], before the head
    const void* head;            // packed [padded, D + rank]
    const void* markov;          // packed [rank, D]: what the head reads of the token before, behind the state. Null: rank is 0
    int64_t rank;
    int64_t drafts_block;        // not 0: a text ends with a block, a token for each level, and nothing is read behind it
    int64_t width, padded;       // columns of the head, and with those that only fill its last block
    const int64_t* ids;          // [width]: the token of each column, null: the same number
    const Policy* policies;      // [R], null: all rows are greedy. Temperature 0: the row is
    const double* uniforms;      // [R, draws, W] in [0, 1)
    const int32_t* keys;         // [R, levels, 2] of noise, null: no row is seeded
    const uint8_t* seeded;       // [R], with keys
    const int64_t *text, *before;  // [N]: tokens to read first, and the addresses of the target's states before them
    int64_t* chosen;             // [nodes], −1 where there is no further token
    uint8_t* finite;             // [S]
    float* probs;                // [S, width], of readers of greedy rows as it was. Null if all rows are greedy

    int64_t widest() const {
        int64_t most = 0;
        for (int64_t i = 0; i < levels; ++i) most = std::max(most, level[i + 1] - level[i]);
        return most;
    }
};

// Draw a column by `left [width]`, which is zero where a sibling was drawn before. −1: nothing is left.
inline int64_t draw_from(const float* left, int64_t width, double uniform, std::vector<double>& blocks) {
    const double mass = mass_of(left, width, blocks.data());
    return mass > 0 ? drawn(left, width, blocks.data(), mass, uniform) : -1;
}

// Write the distribution of a row, of `peak`, to `probs [width]`.
inline void distribution(const float* logits, int64_t width, float peak, const Policy& policy, float* probs) {
    const Rows<float> row{logits, width, width, &peak};
    double mass;
    if (policy.top_k > 0 || policy.top_p < 1 || policy.min_p > 0) {
        const Kept kept = keep(row, 0, policy);
        spread(row, 0, policy.temperature, kept, probs);
        mass = kept.mass;
    } else {
        mass = weigh(row, 0, policy.temperature, probs);
    }
    const float share = 1 / mass;
    for (int64_t c = 0; c < width; ++c) probs[c] *= share;
}

// Choose the tokens behind one reader, from its logits `[width]`.
inline void choose(const Steps& s, int64_t level, int64_t place, const float* logits) {
    const Reader& own = s.reader[place];
    const bool greedy = !s.policies || s.policies[own.row].temperature <= 0;
    int64_t *to = s.chosen + own.first, best;
    const float peak = peak_of(logits, s.width, best);
    float* probs = s.probs ? s.probs + place * s.width : nullptr;
    s.finite[place] = std::isfinite(peak);
    if (!s.finite[place]) {
        if (probs && !greedy) std::fill(probs, probs + s.width, 0);
        return std::fill(to, to + own.children, s.ids ? s.ids[0] : 0);
    }
    if (!greedy) distribution(logits, s.width, peak, s.policies[own.row], probs);
    const float* left = greedy ? logits : probs;
    std::vector<float> changed;
    if (own.children > 1) changed.assign(left, left + s.width), left = changed.data();
    std::vector<double> blocks((s.width + BLOCK - 1) / BLOCK);
    const bool seeded = !greedy && s.keys && s.seeded[own.row];
    for (int64_t i = 0; i < own.children; ++i) {
        int64_t column = best;
        if (seeded) column = best_with_noise(left, s.width, s.ids, s.keys + 2 * (own.row * s.levels + level));
        else if (!greedy) column = draw_from(left, s.width, s.uniforms[(own.row * s.draws + own.number) * s.most + i], blocks);
        else if (i > 0 && !std::isfinite(peak_of(left, s.width, column))) column = -1;
        to[i] = column < 0 ? -1 : s.ids ? s.ids[column] : column;
        if (column >= 0 && own.children > 1) changed[column] = greedy ? -std::numeric_limits<float>::infinity() : 0;
    }
}

// The numbers of a pass over the readers of one level, whose tokens stand behind their rows' texts.
struct Level {
    std::vector<int64_t> ids, slots, places, positions, nodes, row, windows;
    int64_t rows = 0;

    explicit Level(int64_t most)
        : ids(most), slots(most), places(most), positions(most), nodes(most), row(5 * most), windows(most) {}

    void fit(const Steps& s, int64_t level, const Batch& text) {
        rows = 0;
        for (int64_t i = s.level[level], t = 0; i < s.level[level + 1]; ++i, ++t) {
            const Reader& own = s.reader[i];
            const int64_t *of = text.row + 5 * own.row, end = of[3] + of[1], place = std::min(end + own.number - 1, s.max_len);
            ids[t] = std::max<int64_t>(0, s.chosen[own.node]);
            slots[t] = of[2];
            places[t] = place;
            positions[t] = std::min(end + level, s.max_len) - 1;
            nodes[t] = own.seen;
            if (t == 0 || s.reader[i - 1].row != own.row) {
                const int64_t numbers[5] = {t, 0, of[2], place, place};
                std::copy(numbers, numbers + 5, row.data() + 5 * rows);
                windows[rows++] = std::min(end, s.max_len);
            }
            int64_t* last = row.data() + 5 * (rows - 1);
            ++last[1];
            last[4] += place < s.max_len;
        }
    }

    Batch batch(int64_t tokens) const {
        return {tokens, rows, slots.data(), places.data(), positions.data(), nodes.data(), row.data(), windows.data()};
    }
};

// The trees of all rows while they grow. Its functions are for all threads of a parallel region.
template <typename T, typename W>
struct Trees {
    const Layer* layers;
    int64_t count;
    const Model& m;
    const Batch& text;
    const Steps& s;
    float eps, state_eps, scale;
    Space<T>& space;
    int64_t width, head_in, widest;
    EntrySpace<T> entry;
    Lines<Number<T>> normed, before;  // what the head reads, and the normed tokens before
    Level next;

    Trees(const Layer* layers, int64_t count, const Model& m, const Batch& text, const Steps& s, float eps,
          float state_eps, float scale, Space<T>& space)
        : layers(layers), count(count), m(m), text(text), s(s), eps(eps), state_eps(state_eps), scale(scale), space(space),
          width(m.width), head_in(m.width + s.rank), widest(s.widest()),
          entry(s.entry, m.width, std::max(text.tokens, widest)), normed(widest * head_in),
          before(s.markov ? widest * m.width : 0), next(widest) {
        space.fit(m, std::max(text.tokens, widest));
    }

    bool attends() const { return layers[0].qkv; }

    int64_t readers(int64_t level) const { return s.level[level + 1] - s.level[level]; }

    // The last state behind a reader of a level that was just read.
    const float* state_of(int64_t level, int64_t reader) const {
        const int64_t *of = text.row + 5 * s.reader[reader].row, end = of[0] + of[1];
        const float* hidden = space.hidden.data();
        if (s.drafts_block) return hidden + (end - s.levels + level) * width;
        return hidden + (level ? reader - s.level[level] : end - 1) * width;
    }

    // The token before those that are chosen behind a reader of a block.
    int64_t newest_of(int64_t reader) const {
        const Reader& own = s.reader[reader];
        const int64_t* of = text.row + 5 * own.row;
        return own.node < 0 ? s.text[of[0] + of[1] - s.levels] : std::max<int64_t>(0, s.chosen[own.node]);
    }

    void run_layers(const Batch& batch, int64_t level) {
        if (!attends()) return run_head<T, W>(layers[level], m, batch.tokens, entry.input.data(), eps, space);
        const int64_t in = s.entry.joined() ? 2 * width : width;
        for (int64_t i = 0; i < count; ++i)
            if (i == 0) run_layer<T, W>(layers[i], m, batch, entry.input.data(), in, eps, scale, space);
            else run_layer<T, W>(layers[i], m, batch, space.hidden.data(), width, eps, scale, space);
    }

    // Read the texts, or the tokens that were chosen before a level. Masks get states too, which nothing reads.
    void read(int64_t level) {
        if (level == 0) {
            if (s.entry.reads()) fuse<T, W>(s.entry, width, s.before, text.tokens, entry);
            enter<T, W>(s.entry, width, s.text, text.tokens, state_eps, entry);
            run_layers(text, 0);
        } else if (!s.drafts_block) {
#pragma omp single
            next.fit(s, level, text);
            enter<T, W>(s.entry, width, next.ids.data(), readers(level), state_eps, entry);
            run_layers(next.batch(readers(level)), level);
        }
    }

    // Keep the states that the readers of the next level read beside their tokens.
    void hand_on(int64_t level) {
        if (!s.entry.reads() || s.drafts_block || level + 1 == s.levels) return;
        const int64_t first = s.level[level + 1];
#pragma omp for schedule(static)
        for (int64_t i = first; i < s.level[level + 2]; ++i) {
            const float* state = state_of(level, s.reader[i].above);
            T* to = entry.fed.data() + (i - first) * width;
            for (int64_t c = 0; c < width; c += LANES) store(load(state + c), to + c);
        }
    }

    // Return what the head reads, `[readers, head_in]`.
    const Number<T>* head_input(int64_t level) {
        const int64_t first = s.level[level];
#pragma omp for schedule(static)
        for (int64_t i = first; i < s.level[level + 1]; ++i) {
            norm(state_of(level, i), s.norm, width, eps, normed.data() + (i - first) * head_in);
            if (!s.markov) continue;
            const T* newest = (const T*)s.entry.embeddings + newest_of(i) * width;
            norm(newest, entry.ones.data(), width, state_eps, before.data() + (i - first) * width);
        }
        if (s.markov)
            product((const W*)s.markov, s.rank, width, before.data(), readers(level), [&](int64_t t, int64_t o, Vec sums) {
                store(sums, normed.data() + t * head_in + width + o);
            });
        if (attends()) return normed.data();
        return read_by_head<T, W>(layers[level], m, readers(level), normed.data(), space);
    }
};

template <typename T, typename W>
void run_steps(const Layer* layers, int64_t count, const Model& m, const Batch& text, const Steps& s, float eps,
               float state_eps, float scale, int threads) {
    static thread_local Space<T> space;
    static thread_local std::vector<float> held;
    Trees<T, W> trees(layers, count, m, text, s, eps, state_eps, scale, space);
    if (int64_t(held.size()) < trees.widest * s.padded) held.resize(trees.widest * s.padded);
    float* logits = held.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t level = 0; level < s.levels; ++level) {
        const int64_t first = s.level[level], end = s.level[level + 1];
        trees.read(level);
        trees.hand_on(level);
        const Number<T>* read = trees.head_input(level);
        product((const W*)s.head, s.padded, trees.head_in, read, end - first,
                [&](int64_t t, int64_t o, Vec sums) { store(sums, logits + t * s.padded + o); });
#pragma omp for schedule(static)
        for (int64_t i = first; i < end; ++i) choose(s, level, i, logits + (i - first) * s.padded);
    }
}

}  // namespace
