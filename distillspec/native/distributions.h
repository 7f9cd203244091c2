// Distributions that policies make of rows of logits, draws from them, and noise keyed by token.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 256;  // ids that are summed in float32. Sums of blocks are added in double
constexpr int64_t NEAR = 64;    // neighbouring ids whose maximum is found first

template <typename T>
float number(const T* from) {
    if constexpr (std::is_same_v<T, float>) return *from;
    else {
        const uint32_t bits = uint32_t(*from) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
}

// Rows of logits.
template <typename T>
struct Rows {
    const T* held;
    int64_t stride, width;
    const float* peaks;  // the largest logit of each row

    const T* row(int64_t i) const { return held + i * stride; }
};

struct Policy {
    double temperature, top_k, top_p, min_p;  // 0, 1 and 0 switch the filters off
};

// What a policy keeps of a row: logits above `edge`, and those that equal it up to id `cut`.
struct Kept {
    float edge = -std::numeric_limits<float>::infinity();
    int64_t cut = std::numeric_limits<int64_t>::max();
    double mass = 0;  // Σ e^((logit − peak) / temperature) of these

    bool has(float logit, int64_t id) const { return logit > edge || (logit == edge && id <= cut); }
};

// Return the largest number of a row, NaN where it has one. `id`: the lowest that has it, 0 with NaN.
template <typename T>
float peak_of(const T* x, int64_t width, int64_t& id) {
    float peak = -std::numeric_limits<float>::infinity();
    bool sound = true;
    id = 0;
    for (int64_t first = 0; first < width; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, width);
        Vec top = all_of(-std::numeric_limits<float>::infinity());
        Ints wrong = {};
        int64_t c = first;
        for (; c + LANES <= end; c += LANES) {
            const Vec some = load(x + c);
            wrong |= some != some;
            top = some > top ? some : top;
        }
        float most = largest(top);
        for (int i = 0; i < LANES; ++i) sound &= wrong[i] == 0;
        for (; c < end; ++c) {
            most = std::max(most, number(x + c));
            sound &= number(x + c) == number(x + c);
        }
        if (most > peak) {
            peak = most;
            id = first;
        }
    }
    while (sound && id + 1 < width && number(x + id) != peak) ++id;
    if (sound) return peak;
    id = 0;
    return std::numeric_limits<float>::quiet_NaN();
}

// Return Σ e^((logit − peak) / temperature) of a row. `to`: where the terms are kept, null for nowhere.
template <typename T>
double weigh(const Rows<T>& rows, int64_t row, double temperature, float* to) {
    const T* logits = rows.row(row);
    const float peak = rows.peaks[row], scale = 1 / temperature;
    double sum = 0;
    for (int64_t first = 0; first < rows.width; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, rows.width);
        Vec sums = {};
        int64_t c = first;
        for (; c + LANES <= end; c += LANES) {
            const Vec e = exponential((load(logits + c) - peak) * scale);
            if (to) store(e, to + c);
            sums += e;
        }
        for (; c < end; ++c) {
            const float e = exponential((number(logits + c) - peak) * scale);
            if (to) to[c] = e;
            sums[0] += e;
        }
        sum += sum_of(sums);
    }
    return sum;
}

struct Candidate {
    float logit;
    int64_t id;
    bool operator<(const Candidate& other) const {  // the most probable first, of equals the lowest id
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

// Return the tokens whose logits are at least `least`.
template <typename T>
std::vector<Candidate> above(const T* logits, int64_t width, float least) {
    std::vector<Candidate> found;
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) {
        const Ints inside = load(logits + c) >= least;
        int any = 0;
        for (int i = 0; i < LANES; ++i) any |= inside[i];
        if (!any) continue;
        for (int i = 0; i < LANES; ++i)
            if (inside[i]) found.push_back({number(logits + c + i), c + i});
    }
    for (; c < width; ++c)
        if (number(logits + c) >= least) found.push_back({number(logits + c), c});
    return found;
}

// Return a number that at least `count` logits of a row reach, and few others. `maxima`: room for one a piece of the row.
template <typename T>
float edge_of(const T* logits, int64_t width, int64_t count, std::vector<float>& maxima) {
    const int64_t pieces = width / NEAR;
    maxima.clear();
    if (pieces < count) {  // the row itself is ordered
        for (int64_t c = 0; c < width; ++c) maxima.push_back(number(logits + c));
    } else {
        for (int64_t first = 0; first + NEAR <= width; first += NEAR) {
            Vec top = load(logits + first);
            for (int64_t c = LANES; c < NEAR; c += LANES) {
                const Vec some = load(logits + first + c);
                top = some > top ? some : top;
            }
            maxima.push_back(largest(top));
        }
    }
    std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<float>());
    return maxima[count - 1];
}

// Return the most probable tokens of a row, as many as a policy may keep by their mass, maybe more. `mass`: of the whole row.
// Far from the peak there are many tokens and little mass, so that a few are looked at first.
template <typename T>
std::vector<Candidate> likeliest(const Rows<T>& rows, int64_t row, const Policy& policy, double mass) {
    const float peak = rows.peaks[row], scale = 1 / policy.temperature;
    for (float reach = 4.0f;; reach *= 2) {
        const bool all = reach > 300;
        const float least = all ? -std::numeric_limits<float>::infinity() : peak - reach / scale;
        std::vector<Candidate> found = above(rows.row(row), rows.width, least);
        double inside = 0;
        for (const Candidate& each : found) inside += exponential((each.logit - peak) * scale);
        if (all || (policy.top_p < 1 ? inside >= policy.top_p * mass : reach > -std::log(policy.min_p))) return found;
    }
}

// Return what a policy keeps of a row: top-k with all tokens that equal the k-th, of these the smallest set whose mass
// reaches top-p, and of these what has min-p of the largest probability.
template <typename T>
Kept keep(const Rows<T>& rows, int64_t row, const Policy& policy) {
    Kept kept;
    const bool by_count = policy.top_k > 0 && policy.top_k < rows.width, by_mass = policy.top_p < 1;
    kept.mass = weigh(rows, row, policy.temperature, nullptr);
    if (!by_count && !by_mass && policy.min_p <= 0) return kept;
    static thread_local std::vector<float> maxima;
    const T* logits = rows.row(row);
    const float peak = rows.peaks[row], scale = 1 / policy.temperature;
    const float finite = std::min(peak, std::numeric_limits<float>::lowest());  // forbidden tokens have no mass
    std::vector<Candidate> found =
        by_count ? above(logits, rows.width, std::max(finite, edge_of(logits, rows.width, int64_t(policy.top_k), maxima)))
                 : likeliest(rows, row, policy, kept.mass);
    std::sort(found.begin(), found.end());
    const auto weight = [&](size_t place) { return exponential((found[place].logit - peak) * scale); };
    size_t count = found.size(), inside = 0;
    double whole = kept.mass, mass = 0;
    if (by_count && policy.top_k < count) {
        count = policy.top_k;
        while (count < found.size() && found[count].logit == found[count - 1].logit) ++count;
    }
    if (by_count) {
        whole = 0;
        for (size_t place = 0; place < count; ++place) whole += weight(place);
    }
    while (inside < count && (inside == 0 || !by_mass || mass < policy.top_p * whole)) {
        if (inside && weight(inside) < policy.min_p) break;
        mass += weight(inside++);
    }
    kept.edge = found[inside - 1].logit;
    kept.mass = mass;
    if (inside < found.size() && found[inside].logit == kept.edge) kept.cut = found[inside - 1].id;
    return kept;
}

// Write e^((logit − peak) / temperature) of what is kept of a row, and 0 for the rest.
template <typename T>
void spread(const Rows<T>& rows, int64_t row, double temperature, const Kept& kept, float* to) {
    weigh(rows, row, temperature, to);
    if (kept.edge == -std::numeric_limits<float>::infinity()) return;
    const T* logits = rows.row(row);
    int64_t c = 0;
    for (; c + LANES <= rows.width; c += LANES) store(load(logits + c) < kept.edge ? Vec{} : load(to + c), to + c);
    for (; c < rows.width; ++c)
        if (number(logits + c) < kept.edge) to[c] = 0;
    if (kept.cut < rows.width)
        for (c = kept.cut + 1; c < rows.width; ++c)
            if (number(logits + c) == kept.edge) to[c] = 0;
}

template <typename T>
double weight_of(const Rows<T>& rows, int64_t row, double temperature, const Kept& kept, int64_t token) {
    const float logit = number(rows.row(row) + token);
    return kept.has(logit, token) ? exponential((logit - rows.peaks[row]) * float(1 / temperature)) : 0;
}

// Return the column of a token. `ids`: the token of each column in ascending order, null: the same number.
inline int64_t column_of(const int64_t* ids, int64_t width, int64_t token) {
    if (!ids) return token;
    return std::min<int64_t>(std::lower_bound(ids, ids + width, token) - ids, width - 1);
}

double mass_of(const float* p, int64_t width, double* blocks) {
    double all = 0;
    for (int64_t first = 0, block = 0; first < width; first += BLOCK, ++block) {
        const int64_t end = std::min(first + BLOCK, width);
        Vec sums = {};
        int64_t c = first;
        for (; c + LANES <= end; c += LANES) sums += load(p + c);
        for (; c < end; ++c) sums[0] += p[c];
        blocks[block] = sum_of(sums);
        all += blocks[block];
    }
    return all;
}

// Return the first id at which the mass exceeds u of the whole. Ids without mass are never returned.
int64_t drawn(const float* p, int64_t width, const double* blocks, double mass, double u) {
    double left = std::min(u * mass, std::nextafter(mass, 0.0));
    const int64_t count = (width + BLOCK - 1) / BLOCK;
    int64_t block = 0, last = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (blocks[i] <= 0) continue;
        block = i;
        if (left < blocks[i]) break;
        left -= blocks[i];
    }
    for (int64_t c = block * BLOCK; c < std::min((block + 1) * BLOCK, width); ++c) {
        if (p[c] <= 0) continue;
        last = c;
        if (left < p[c]) break;
        left -= p[c];
    }
    return last;
}

// The hash of serving/decoding/noise.py, with its constants.
inline int32_t mixed(int32_t x, int32_t halfway) {
    constexpr int32_t MASK = 0x7FFFFFFF;
    uint32_t y = x;
    y = ((y ^ (y >> 16)) * 0x7FEB352Du ^ halfway) & MASK;
    y = ((y ^ (y >> 15)) * 0x046CA68Bu) & MASK;
    return y ^ (y >> 16);
}

inline int32_t noise(int32_t id, const int32_t* key) { return mixed(mixed(id, 0) ^ key[0], key[1]); }

constexpr float STEP = 1.0 / 2147483648.0 * (1 - 1.0 / 4194304.0);

// Return the column with the largest p / E, for exponential noise E of its token under a key. −1: nothing has any mass.
inline int64_t best_with_noise(const float* p, int64_t width, const int64_t* ids, const int32_t* key) {
    float best = 0;
    int64_t column = -1;
    int32_t bits[BLOCK];
    for (int64_t first = 0; first < width; first += BLOCK) {
        const int64_t count = std::min(BLOCK, width - first);
        for (int64_t i = 0; i < count; ++i) bits[i] = noise(int32_t(ids ? ids[first + i] : first + i), key);
        for (int64_t i = 0; i < count; ++i) {
            const float u = (float(bits[i]) + 0.5f) * STEP;
            if (u * best >= p[first + i]) continue;  // E >= u: it cannot win
            const float score = p[first + i] / -std::log1p(-u);
            if (score > best) best = score, column = first + i;
        }
    }
    return column;
}

}  // namespace
