// Single products on CPUs, and how weights are packed here. Called by way of vector_kernel.py.

#include <vector>

#include "products.h"

namespace {

// y = x times a packed weight `[out, in]`.
template <typename T>
void multiply_all(const Weight<T>* weight, int64_t out, int64_t in, const T* x, int64_t tokens, T* y, int threads) {
    static thread_local Lines<Number<T>> own;
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

#define PRODUCT(name, type)                                                                                       \
    extern "C" void name(const void* weight, int64_t out, int64_t in, const void* x, int64_t tokens, void* y,     \
                         int threads) {                                                                           \
        multiply_all<type>((const Weight<type>*)weight, out, in, (const type*)x, tokens, (type*)y, threads);      \
    }

PRODUCT(product_float32, float)
PRODUCT(product_bfloat16, uint16_t)

extern "C" int lanes() { return LANES; }
extern "C" int by_pairs() { return UNITS; }
