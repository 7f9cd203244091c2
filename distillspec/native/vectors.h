// Vectors of float32 in GCC's vector types, so that one text serves AVX-512, AVX2 and NEON, and of bfloat16 in pairs
// where the processor multiplies these.

#pragma once

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int LINE = 64;  // bytes that a cache reads at once
constexpr float SMALLEST = -87.0f;  // e^x is 0 below

// A vector of whole lines of the cache: what lies across two is read slowly.
template <typename T>
struct LineAllocator {
    using value_type = T;
    LineAllocator() = default;
    template <typename Other>
    LineAllocator(const LineAllocator<Other>&) {}
    T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(LINE)); }
    void deallocate(T* held, size_t) { ::operator delete(held, std::align_val_t(LINE)); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#if defined(__AVX512BF16__)
constexpr bool UNITS = true;
#else
constexpr bool UNITS = false;
#endif

// True for T = bfloat16 where the processor multiplies pairs of it.
template <typename T>
constexpr bool BY_PAIRS = UNITS && sizeof(T) == 2;

inline Vec load(const float* from) {
    Vec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Vec load(const uint16_t* from) {  // bfloat16: the upper half of a float32
    Halves x;
    std::memcpy(&x, from, sizeof x);
#if defined(__AVX512F__)
    return (Vec)((Words)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (Vec)(__builtin_convertvector(x, Words) << 16);
#endif
}

typedef _Float16 Half;

inline Vec load(const Half* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec x;
    for (int i = 0; i < LANES; ++i) x[i] = from[i];
    return x;
#endif
}

inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    Vec x;
    for (int i = 0; i < LANES; ++i) x[i] = from[i];
    return x;
#endif
}

// x in all lanes. `Vec{} + x` would cost an addition: it turns −0 into 0.
inline Vec all_of(float x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (Vec)_mm256_set1_ps(x);
#else
    return Vec{} + x;
#endif
}

inline Vec rounded(Vec x, const float*) { return x; }

inline Vec rounded(Vec x, const uint16_t*) {  // to the nearest bfloat16, ties to even
    const Words bits = (Words)x, high = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
    return (Vec)(x == x ? high : Words{} + 0x7FC00000);
}

inline void store(Vec x, float* to) { std::memcpy(to, &x, sizeof x); }

inline void store(Vec x, uint16_t* to) {
    const Halves y = __builtin_convertvector((Words)rounded(x, to) >> 16, Halves);
    std::memcpy(to, &y, sizeof y);
}

// e^x of x <= 0, with a relative error of 2e-7.
inline Vec exponential(Vec x) {
    const Vec y = (x < SMALLEST ? all_of(SMALLEST) : x) * 1.44269504088896341f;
    const Ints whole = __builtin_convertvector(y - 0.5f, Ints);
    const Vec t = (y - __builtin_convertvector(whole, Vec)) * 0.693147180559945309f;
    Vec e = 8.3333338e-3f + t * 1.3888889e-3f;  // Taylor's polynomial, |t| <= 0.35
    e = 4.1666668e-2f + t * e;
    e = 1.6666667e-1f + t * e;
    e = 0.5f + t * e;
    e = 1.0f + t * (1.0f + t * e);
    return x < SMALLEST ? Vec{} : e * (Vec)((whole + 127) << 23);
}

// log x of normal numbers x > 0, with an error of 2e-7 of the result or of 1.
inline Vec logarithm(Vec x) {
    const Ints bits = (Ints)x;
    Vec whole = __builtin_convertvector((bits >> 23) - 127, Vec);
    Vec part = (Vec)((bits & 0x7FFFFF) | 0x3F800000);  // in [1, 2)
    const Ints large = part > 1.41421356f;
    part = large ? part * 0.5f : part;
    whole = large ? whole + 1.0f : whole;
    const Vec t = (part - 1.0f) / (part + 1.0f), square = t * t;  // log = 2 artanh t, |t| <= 0.172
    Vec series = 0.142857143f + square * 0.111111111f;
    series = 0.2f + square * series;
    series = 0.333333333f + square * series;
    return whole * 0.693147180559945309f + 2.0f * t * (1.0f + square * series);
}

inline float exponential(float x) { return exponential(all_of(x))[0]; }

// STEP: distance of the lanes that are compared first.
template <int STEP = LANES / 2>
inline float largest(Vec x) {
    if constexpr (STEP == 0) {
        return x[0];
    } else {
        Ints other;
        for (int i = 0; i < LANES; ++i) other[i] = i ^ STEP;
        const Vec y = __builtin_shuffle(x, other);
        return largest<STEP / 2>(x > y ? x : y);
    }
}

inline float sum_of(Vec x) {
    float all = 0;
    for (int i = 0; i < LANES; ++i) all += x[i];
    return all;
}

// Lane i of the result is the sum of the lanes of parts[i], of N parts. Halves are added first.
template <int N>
inline Vec sums(const Vec* parts) {
    if constexpr (N == 1) {
        return parts[0];
    } else {
        const Vec a = sums<N / 2>(parts), b = sums<N / 2>(parts + N / 2);
        Ints low, high;
        for (int i = 0; i < LANES; ++i) {
            low[i] = (i % N < N / 2 ? 0 : LANES) + i / N * N + i % (N / 2);
            high[i] = low[i] + N / 2;
        }
        return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    }
}

#if defined(__AVX512BF16__)
typedef __m512i Pairs;  // 32 of bfloat16

inline Pairs pairs(const uint16_t* from) { return _mm512_loadu_si512(from); }

inline Pairs widened(const uint8_t* from) {  // 32 bytes
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
}

inline Pairs all_of_number(int16_t x) { return _mm512_set1_epi16(x); }

inline Pairs all_of_pair(const uint16_t* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return _mm512_set1_epi32(both);
}

// The first and the second numbers of all pairs, as float32.
inline void split(Pairs x, Vec& first, Vec& second) {
    first = (Vec)((Words)x << 16);
    second = (Vec)((Words)x & 0xFFFF0000);
}

// Add the products of both numbers of each pair. Sums are float32.
inline Vec add_products(Vec sum, Pairs a, Pairs b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

inline float sum_of(const uint16_t* x, int64_t count) {  // count: of whole vectors of LANES
    Vec all[4] = {};  // a sum must wait for the one before
    for (int64_t i = 0; i < count; i += LANES) all[i / LANES % 4] += load(x + i);
    return sum_of((all[0] + all[1]) + (all[2] + all[3]));
}
#endif

}  // namespace
