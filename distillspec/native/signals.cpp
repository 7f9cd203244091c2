// The most probable tokens of rows of logits, and what the replay log keeps of a step, on CPUs. Called by way of
// signal_kernel.py.

#include "distributions.h"

namespace {

// Write the `count` most probable ids of a row, of equals the lowest first, and their log-probabilities, and its largest
// logit. Return log Z.
template <typename T>
float signal_of(const T* logits, int64_t width, int64_t count, int32_t* ids, float* logprobs, float& peak) {
    static thread_local std::vector<float> maxima;
    int64_t best;
    peak = peak_of(logits, width, best);
    if (!std::isfinite(peak)) {
        for (int64_t i = 0; i < count; ++i) ids[i] = i;
        std::fill(logprobs, logprobs + count, std::numeric_limits<float>::quiet_NaN());
        return std::numeric_limits<float>::quiet_NaN();
    }
    std::vector<Candidate> found = above(logits, width, edge_of(logits, width, count, maxima));
    std::partial_sort(found.begin(), found.begin() + count, found.end());
    const float log_z = peak + std::log(weigh(Rows<T>{logits, width, width, &peak}, 0, 1.0, nullptr));
    for (int64_t i = 0; i < count; ++i) {
        ids[i] = found[i].id;
        logprobs[i] = found[i].logit - log_z;
    }
    return log_z;
}

template <typename T>
void signals(const T* logits, int64_t rows, int64_t stride, int64_t width, int64_t count, int32_t* ids, float* logprobs,
             float* log_z, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; ++row) {
        float peak;
        log_z[row] = signal_of(logits + row * stride, width, count, ids + row * count, logprobs + row * count, peak);
    }
}

// One emitted token. As in signal_kernel.py.
struct Position {
    int64_t row, token;  // of the logits, and the emitted token
    int64_t drafted;     // the drafted token, −1 for none
    const float* q;      // what it was drawn from, null: deterministic
    const int64_t* ids;  // the token of each column in ascending order, null: the same number
    int64_t width;
};

float entropy_of(const float* q, int64_t width) {
    constexpr float LEAST = std::numeric_limits<float>::min();
    double sum = 0;
    for (int64_t first = 0; first < width; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, width);
        Vec sums = {};
        int64_t c = first;
        for (; c + LANES <= end; c += LANES) {
            const Vec some = load(q + c);
            sums -= some < LEAST ? Vec{} : some * logarithm(some < LEAST ? all_of(1.0f) : some);
        }
        for (; c < end; ++c) sums[0] -= q[c] < LEAST ? 0 : q[c] * std::log(q[c]);
        sum += sum_of(sums);
    }
    return sum;
}

// Write log p(token) under a policy, and log Σ p^(1/temperature), as `policy_figures` does. NaN: it judges no draft.
template <typename T>
void policy_of(const Rows<T>& logits, int64_t token, double temperature, float log_z, float* to) {
    const float raw = number(logits.held + token) - log_z;
    to[0] = temperature == 0 ? 0 : std::isnan(temperature) ? temperature : raw;
    to[1] = 0;
    if (std::isnan(temperature) || temperature == 0 || temperature == 1) return;
    const double heat = 1 / temperature, softened = std::log(weigh(logits, 0, temperature, nullptr));
    to[1] = softened + logits.peaks[0] * heat - log_z * heat;
    to[0] = raw * heat - to[1];
}

void draft_of(const Position& at, float* to) {
    to[0] = at.drafted < 0 ? std::numeric_limits<float>::quiet_NaN() : 1;
    to[1] = at.drafted < 0 ? to[0] : 0;
    if (at.drafted < 0 || !at.q) return;
    to[0] = at.q[column_of(at.ids, at.width, at.drafted)];
    to[1] = entropy_of(at.q, at.width);
}

// Write `Packed` of signal.py: ids, log-probabilities and the tail's mass, two figures of the policy and two of the draft.
template <typename T>
void record(const T* logits, int64_t stride, int64_t width, int64_t count, const Position* positions,
            const double* temperatures, int64_t n, uint8_t* packed, int threads) {
    const int64_t bytes = count * (sizeof(int32_t) + sizeof(Half)) + sizeof(float) + 4 * sizeof(Half);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && n > 1)
    for (int64_t i = 0; i < n; ++i) {
        std::vector<int32_t> ids(count);
        std::vector<float> logprobs(count);
        std::vector<Half> rounded(count + 4);
        const T* row = logits + positions[i].row * stride;
        float peak, figures[4];
        const float log_z = signal_of(row, width, count, ids.data(), logprobs.data(), peak);
        double inside = 0;  // of the rounded values, so that the parts still sum to one
        for (int64_t k = 0; k < count; ++k) {
            rounded[k] = logprobs[k];
            inside += exponential(float(rounded[k]));
        }
        const float tail = std::isnan(log_z) ? log_z : std::max(0.0, 1 - inside);
        policy_of(Rows<T>{row, width, width, &peak}, positions[i].token, temperatures[i], log_z, figures);
        draft_of(positions[i], figures + 2);
        for (int k = 0; k < 4; ++k) rounded[count + k] = figures[k];
        uint8_t* to = packed + i * bytes;
        std::memcpy(to, ids.data(), count * sizeof(int32_t));
        std::memcpy(to += count * sizeof(int32_t), rounded.data(), count * sizeof(Half));
        std::memcpy(to += count * sizeof(Half), &tail, sizeof tail);
        std::memcpy(to + sizeof tail, rounded.data() + count, 4 * sizeof(Half));
    }
}

}  // namespace

#define EXPORTED(type, name)                                                                                           \
    extern "C" void signals_##name(const void* logits, int64_t rows, int64_t stride, int64_t width, int64_t count,      \
                                   int32_t* ids, float* logprobs, float* log_z, int threads) {                         \
        signals((const type*)logits, rows, stride, width, count, ids, logprobs, log_z, threads);                       \
    }                                                                                                                  \
    extern "C" void record_##name(const void* logits, int64_t stride, int64_t width, int64_t count,                     \
                                  const void* positions, const double* temperatures, int64_t n, void* packed,          \
                                  int threads) {                                                                       \
        record((const type*)logits, stride, width, count, (const Position*)positions, temperatures, n,                 \
               (uint8_t*)packed, threads);                                                                             \
    }

EXPORTED(float, float32)
EXPORTED(uint16_t, bfloat16)
