// What the first layer of a draft reads of some tokens: embeddings, and states of the tokens before.

#pragma once

#include "layers.h"

namespace {

// As in models/draft_steps.py. States stand beside the embeddings, or are projected and added to them.
struct Entry {
    const void* embeddings;     // [V, D] of T
    const void* fusion;         // packed [D, kept · target_width]: states of the target → one of the draft. Null: it is one
    const void* projection;     // packed [D, D] of normed states that are added, null: they stand beside
    const void* masks;          // [masks, 2 · D] of T: input of ids −1, −2, …, null: there are none
    int64_t kept, target_width; // kept 0: the draft reads tokens alone
    const int64_t* columns;     // [kept]: where each begins among those that the target keeps of a token

    bool reads() const { return kept > 0; }
    bool joined() const { return reads() && !projection; }
};

// Buffers for N tokens.
template <typename T>
struct EntrySpace {
    Lines<T> input, fed;                // [N, D or 2 D] and [N, D]
    Lines<Number<T>> gathered, normed;  // [N, kept · target_width] and [N, D]
    Lines<float> added, ones;           // [N, D] and [D]

    EntrySpace(const Entry& e, int64_t width, int64_t tokens)
        : input(tokens * width * (e.joined() ? 2 : 1)), fed(e.reads() ? tokens * width : 0),
          gathered(tokens * e.kept * e.target_width), normed(e.projection ? tokens * width : 0),
          added(e.projection ? tokens * width : 0), ones(width, 1.0f) {}
};

// Fuse the target's states of the token before each of N into `fed`. `before`: their addresses, 0 for none: zeros.
template <typename T, typename W>
void fuse(const Entry& e, int64_t width, const int64_t* before, int64_t tokens, EntrySpace<T>& space) {
    const int64_t all = e.kept * e.target_width;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < e.kept; ++i) {
            const T* from = (const T*)before[t] + e.columns[i];
            Number<T>* to = space.gathered.data() + t * all + i * e.target_width;
            for (int64_t c = 0; c < e.target_width; c += LANES) store(before[t] ? load(from + c) : Vec{}, to + c);
        }
    const auto keep = [&](int64_t t, int64_t c, Vec state) { store(state, space.fed.data() + t * width + c); };
    if (e.fusion) return product((const W*)e.fusion, width, all, space.gathered.data(), tokens, keep);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < width; c += LANES) keep(t, c, load(space.gathered.data() + t * width + c));
}

// Write the input of N tokens to `space.input`. Their states are in `fed`.
template <typename T, typename W>
void enter(const Entry& e, int64_t width, const int64_t* ids, int64_t tokens, float state_eps, EntrySpace<T>& space) {
    const T* embeddings = (const T*)e.embeddings;
    const int64_t in = e.joined() ? 2 * width : width;
    if (e.projection) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t)
            norm(space.fed.data() + t * width, space.ones.data(), width, state_eps, space.normed.data() + t * width);
        product((const W*)e.projection, width, width, space.normed.data(), tokens,
                [&](int64_t t, int64_t o, Vec sums) { store(sums, space.added.data() + t * width + o); });
    }
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        T* to = space.input.data() + t * in;
        if (ids[t] < 0) {
            const T* mask = (const T*)e.masks - (1 + ids[t]) * in;
            std::copy(mask, mask + in, to);
            continue;
        }
        const T *own = embeddings + ids[t] * width, *fed = space.fed.data() + t * width;
        for (int64_t c = 0; c < width; c += LANES) {
            Vec x = load(own + c);
            if (e.projection) x += load(space.added.data() + t * width + c);
            store(x, to + c);
            if (e.joined()) store(load(fed + c), to + width + c);
        }
    }
}

}  // namespace
