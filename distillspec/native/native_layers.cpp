// Layers of a Llama, and trees of a draft, on CPUs, each in one call. Called by way of vector_kernel.py, which builds
// this for each kind of model by itself: MODEL and WEIGHTS are the types of its numbers and of its packed weights.

#include "draft_steps.h"

namespace {

template <typename T, typename From>
void keep_states(const States& states, int64_t after, const From* hidden, const Model& m, const Batch& batch) {
    if (!states.held || states.columns[after] < 0) return;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.tokens; ++t) {
        T* to = (T*)states.held + batch.slots[t] * states.slot + batch.places[t] * states.place + states.columns[after];
        for (int64_t c = 0; c < m.width; c += LANES) store(load(hidden + t * m.width + c), to + c);
    }
}

template <typename T, typename W>
void run(const Layer* layers, int64_t count, const Model& m, const Batch& batch, const States& states, const T* input,
         int64_t in, const float* final_norm, T* output, float eps, float scale, int threads) {
    static thread_local Space<T> own;
    own.fit(m, batch.tokens);
    Space<T>& space = own;
    const float* hidden = own.hidden.data();
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        keep_states<T>(states, 0, input, m, batch);
        for (int64_t i = 0; i < count; ++i) {
            if (i == 0) run_layer<T, W>(layers[i], m, batch, input, in, eps, scale, space);
            else run_layer<T, W>(layers[i], m, batch, hidden, m.width, eps, scale, space);
            keep_states<T>(states, i + 1, hidden, m, batch);
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < batch.tokens; ++t) {
            const float* own = hidden + t * m.width;
            T* to = output + t * m.width;
            if (final_norm) norm(own, final_norm, m.width, eps, to);
            else for (int64_t c = 0; c < m.width; c += LANES) store(load(own + c), to + c);
        }
    }
}

}  // namespace

extern "C" void layers(const void* layers, int64_t count, const void* model, const void* batch, const void* states,
                       const void* input, int64_t in, const void* final_norm, void* output, float eps, float scale,
                       int threads) {
    run<MODEL, WEIGHTS>((const Layer*)layers, count, *(const Model*)model, *(const Batch*)batch, *(const States*)states,
                        (const MODEL*)input, in, (const float*)final_norm, (MODEL*)output, eps, scale, threads);
}

extern "C" void steps(const void* layers, int64_t count, const void* model, const void* text, const void* steps,
                      float eps, float state_eps, float scale, int threads) {
    run_steps<MODEL, WEIGHTS>((const Layer*)layers, count, *(const Model*)model, *(const Batch*)text,
                              *(const Steps*)steps, eps, state_eps, scale, threads);
}
