// Layers over few tokens, single products, and draft loops on CPUs, each in one call. Called by way of vector_kernel.py.

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

#define EXPORTED(name, type, weight)                                                                                          \
    extern "C" void name(const void* layers, int64_t count, const void* model, const void* batch, const void* states, \
                         const void* input, int64_t in, const void* final_norm, void* output, float eps, float scale, \
                         int threads) {                                                                               \
        run<type, weight>((const Layer*)layers, count, *(const Model*)model, *(const Batch*)batch, *(const States*)states, \
            (const type*)input, in, (const float*)final_norm, (type*)output, eps, scale, threads);                    \
    }

EXPORTED(layers_float16_of_float32, float, Half)
EXPORTED(layers_int8_of_float32, float, int8_t)
EXPORTED(layers_bfloat16_of_bfloat16, uint16_t, uint16_t)
#if defined(__AVX512BF16__)
EXPORTED(layers_uint8_of_bfloat16, uint16_t, uint8_t)
#endif

#define PRODUCT(name, type)                                                                                       \
    extern "C" void name(const void* weight, int64_t out, int64_t in, const void* x, int64_t tokens, void* y,     \
                         int threads) {                                                                           \
        multiply_all<type>((const Weight<type>*)weight, out, in, (const type*)x, tokens, (type*)y, threads);      \
    }

PRODUCT(product_float32, float)
PRODUCT(product_bfloat16, uint16_t)

#define STEPS(name, type, weight)                                                                                     \
    extern "C" void name(const void* layers, int64_t count, const void* model, const void* text, const void* steps,   \
                         float eps, float state_eps, float scale, int threads) {                                      \
        run_steps<type, weight>((const Layer*)layers, count, *(const Model*)model, *(const Batch*)text,               \
                                *(const Steps*)steps, eps, state_eps, scale, threads);                                \
    }

STEPS(steps_float16_of_float32, float, Half)
STEPS(steps_int8_of_float32, float, int8_t)
STEPS(steps_bfloat16_of_bfloat16, uint16_t, uint16_t)
#if defined(__AVX512BF16__)
STEPS(steps_uint8_of_bfloat16, uint16_t, uint8_t)
#endif

extern "C" int lanes() { return LANES; }
extern "C" int by_pairs() { return UNITS; }
