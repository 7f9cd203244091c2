// Heads of a draft without attention (models/heads.py), each of one drafted position. Their products are those of an MLP.

#pragma once

#include "layers.h"

namespace {

// Hydra's reads embeddings and states side by side, `[tokens, 2 · width]`, and adds to the state. Medusa's has no `gate_up`,
// and passes the state on.
template <typename T, typename W>
void run_head(const Layer& head, const Model& m, int64_t tokens, const T* input, float eps, Space<T>& space) {
    const int64_t width = m.width;
    float* hidden = space.hidden.data();
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const T *own = input + 2 * t * width, *state = own + width;
        auto* to = space.normed.data() + 2 * t * width;
        if (head.first_norm) norm(own, head.first_norm, width, eps, to);
        if (head.state_norm) norm(state, head.state_norm, width, eps, to + width);
        for (int64_t c = 0; c < width; c += LANES) store(load(state + c), hidden + t * width + c);
    }
    if (!head.gate_up) return;
    product((const W*)head.gate_up, m.inner, 2 * width, space.normed.data(), tokens, [&](int64_t t, int64_t o, Vec sums) {
        store(silu(head.scales[2] * sums), space.active.data() + t * m.inner + o);
    });
    product((const W*)head.down, width, m.inner, space.active.data(), tokens, adding(hidden, width, head.scales[3]));
}

// Return what the draft's last product reads of normed states `[tokens, width]`: Medusa's head adds to them.
template <typename T, typename W>
const Number<T>* read_by_head(const Layer& head, const Model& m, int64_t tokens, const Number<T>* normed, Space<T>& space) {
    if (head.gate_up) return normed;
    product((const W*)head.down, m.width, m.width, normed, tokens, [&](int64_t t, int64_t o, Vec sums) {
        const int64_t at = t * m.width + o;
        store(load(normed + at) + silu(head.scales[3] * sums), space.active.data() + at);
    });
    return space.active.data();
}

}  // namespace
