// Verdicts on drafted trees by rejection sampling, and maxima of rows of logits, on CPUs. Called by way of verdict_kernel.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 256;  // ids that are summed in float32. Sums of blocks are added in double
constexpr double SMALL = std::numeric_limits<float>::min();

// As in verdict_kernel.py.
struct Group {
    int64_t parent, first, count;  // node that it continues, −1: the text. Its nodes are nodes[first], …
    const float* q;                // what they were drawn from, null: deterministic
    const int64_t* ids;            // the token of each column in ascending order, null: the same number
    int64_t width;
};

struct Tree {
    int64_t row;              // of the text's logits. Those of node i are row + 1 + i
    int64_t first, nodes;     // of its tokens
    int64_t group, groups;    // its groups: groups[group], …
    int64_t whole;            // 1: a chain that is verified as a whole
};

template <typename T>
struct Asked {
    int64_t trees, width, stride, most;  // most: nodes of the largest tree
    const T* logits;
    const float* peaks;  // largest logit of each row
    const Tree* tree;
    const Group* group;
    const int64_t *nodes, *tokens;
    const double* temperatures;  // [trees]
    const double *accept, *own;  // one a node, and one a tree, in [0, 1)
    int64_t* found;              // [trees, 1 + most]: the next token, then the accepted nodes, and −1
};

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

// Return Σ e^((logit − peak) / temperature) of a row. `to`: where the terms are kept, null for nowhere.
template <typename T>
double weigh(const Asked<T>& asked, int64_t row, double temperature, float* to) {
    const T* logits = asked.logits + row * asked.stride;
    const float peak = asked.peaks[row], scale = 1 / temperature;
    double sum = 0;
    for (int64_t first = 0; first < asked.width; first += BLOCK) {
        const int64_t end = std::min(first + BLOCK, asked.width);
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

template <typename T>
double weight_of(const Asked<T>& asked, int64_t row, double temperature, int64_t token) {
    const float x = number(asked.logits + row * asked.stride + token) - asked.peaks[row];
    return exponential(x * float(1 / temperature));
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

int64_t column_of(const Group& group, int64_t token) {
    if (!group.ids) return token;
    const int64_t place = std::lower_bound(group.ids, group.ids + group.width, token) - group.ids;
    return std::min(place, group.width - 1);
}

struct Space {
    std::vector<float> p;
    std::vector<double> blocks;
};

inline Space& space_of_thread() {
    static thread_local Space own;
    return own;
}

template <typename T>
struct Judge {
    const Asked<T>& asked;
    const Tree& tree;
    const double temperature, own, *accept;
    const int64_t* tokens;
    int64_t* found;
    float* p;            // [width], not normalised
    double* blocks;      // [width / BLOCK], sums of p
    const double* sums;  // [nodes], of each row's weights, for chains that are verified as a whole

    Judge(const Asked<T>& all, int64_t i, Space& space, const double* known)
        : asked(all), tree(all.tree[i]), temperature(all.temperatures[i]), own(all.own[i]),
          accept(all.accept + tree.first), tokens(all.tokens + tree.first), found(all.found + i * (1 + all.most)),
          sums(known) {
        space.p.resize(asked.width);
        space.blocks.resize((asked.width + BLOCK - 1) / BLOCK);
        p = space.p.data();
        blocks = space.blocks.data();
        std::fill(found, found + 1 + asked.most, -1);
    }

    const Group& group(int64_t i) const { return asked.group[tree.group + i]; }

    // Block verification: see serving/decoding/block_verification.py.
    void as_a_whole() {
        std::vector<double> weights(1 + tree.nodes, 1.0);
        for (int64_t i = 0; i < tree.nodes; ++i) {
            const double at = weight_of(asked, tree.row + i, temperature, tokens[i]) / sums[i];
            const double q = group(i).q[column_of(group(i), tokens[i])];
            weights[i + 1] = std::min(1.0, weights[i] * at / std::max(q, SMALL));
        }
        int64_t taken = tree.nodes;
        for (; taken > 0; --taken) {
            double chance = weights[taken];
            if (taken < tree.nodes) {
                const double above = surplus(taken, weights[taken] / sums[taken]), left = above + (1 - weights[taken]);
                chance = left > 0 ? above / left : 1.0;
            }
            if (accept[taken - 1] < chance) break;
        }
        for (int64_t i = 0; i < taken; ++i) found[1 + i] = i;
        weigh(asked, tree.row + taken, temperature, p);
        // w · p − q, in units of p. Where rounding leaves nothing, w · p = q up to rounding.
        if (taken < tree.nodes && !subtract(group(taken), sums[taken] / weights[taken], {}))
            weigh(asked, tree.row + taken, temperature, p);
        draw();
    }

    // Return Σ max(0, share · p − q) behind `taken` tokens, for p in units of its row.
    double surplus(int64_t taken, double share) {
        const Group& next = group(taken);
        double above = 0;
        if (!next.ids) {
            weigh(asked, tree.row + taken, temperature, p);
            for (int64_t c = 0; c < asked.width; ++c) above += std::max(0.0, p[c] * share - next.q[c]);
            return above;
        }
        const T* logits = asked.logits + (tree.row + taken) * asked.stride;
        const float peak = asked.peaks[tree.row + taken], scale = 1 / temperature;
        double known = 0;
        for (int64_t c = 0; c < next.width; c += LANES) {
            const int64_t some = std::min<int64_t>(LANES, next.width - c);
            Vec x = {};
            for (int64_t i = 0; i < some; ++i) x[i] = number(logits + next.ids[c + i]);
            const Vec e = exponential((x - peak) * scale);
            for (int64_t i = 0; i < some; ++i) {
                known += e[i];
                above += std::max(0.0, e[i] * share - next.q[c + i]);
            }
        }
        return above + std::max(0.0, sums[taken] - known) * share;
    }

    // Level by level: see `verify_tree` in serving/decoding/verification.py.
    void by_level() {
        for (int64_t at = -1, depth = 1; at < tree.nodes; ++depth) {
            const double mass = weigh(asked, tree.row + 1 + at, temperature, p);
            const int64_t child = accepted(at, mass);
            if (child < 0) break;
            found[depth] = at = child;
        }
        draw();
    }

    // Return the accepted child of a node, −1 for none. `p`, of this mass, becomes what is left.
    int64_t accepted(int64_t at, double mass) {
        for (int64_t i = 0; i < tree.groups; ++i) {
            const Group& tried = group(i);
            if (tried.parent != at) continue;
            std::vector<int64_t> gone;  // columns of rejected siblings
            for (int64_t k = 0; k < tried.count; ++k) {
                const int64_t child = asked.nodes[tried.first + k], token = tokens[child];
                if (!tried.q) {
                    if (accept[child] < p[token] / mass) return child;
                    const double rest = take_out(token);
                    if (rest > 0) mass = rest;
                    continue;
                }
                const int64_t column = column_of(tried, token);
                const double left = gone.empty() ? 1.0 : left_of(tried, gone);
                if (accept[child] * tried.q[column] / left < p[token] / mass) return child;
                const double rest = subtract(tried, mass / left, gone);
                if (rest > 0) mass = rest;
                else restore(tried, mass / left, gone);
                gone.push_back(column);
            }
        }
        return -1;
    }

    // Return what rejected siblings leave of q.
    static double left_of(const Group& tried, const std::vector<int64_t>& gone) {
        double left = 0;
        for (int64_t c = 0; c < tried.width; ++c) left += tried.q[c];
        for (const int64_t c : gone) left -= tried.q[c];
        return std::max(left, SMALL);
    }

    // Turn p into max(0, p − scale · q), q without columns that are gone. Return its mass.
    double subtract(const Group& tried, double scale, const std::vector<int64_t>& gone) {
        std::vector<float> kept;
        for (const int64_t c : gone) kept.push_back(p[tried.ids ? tried.ids[c] : c]);
        for (int64_t c = 0; c < tried.width; ++c) {
            float& at = p[tried.ids ? tried.ids[c] : c];
            at = std::max(0.0, at - scale * tried.q[c]);
        }
        for (size_t i = 0; i < gone.size(); ++i) p[tried.ids ? tried.ids[gone[i]] : gone[i]] = kept[i];
        return mass_of(p, asked.width, blocks);
    }

    // Rounding left nothing: p was scale · q, up to rounding.
    void restore(const Group& tried, double scale, const std::vector<int64_t>& gone) {
        for (int64_t c = 0; c < tried.width; ++c) p[tried.ids ? tried.ids[c] : c] = scale * tried.q[c];
        for (const int64_t c : gone) p[tried.ids ? tried.ids[c] : c] = 0;
    }

    // Take a token out of p. Return the mass that is left. If there is none, the token stays.
    double take_out(int64_t token) {
        const float before = p[token];
        p[token] = 0;
        const double rest = mass_of(p, asked.width, blocks);
        if (!(rest > 0)) p[token] = before;
        return rest;
    }

    void draw() {
        const double mass = mass_of(p, asked.width, blocks);
        found[0] = drawn(p, asked.width, blocks, mass, own);
    }
};

template <typename T>
void judge(const Asked<T>& asked, int threads) {
    std::vector<int64_t> starts(1 + asked.trees);  // where the sums of a tree's rows begin
    for (int64_t i = 0; i < asked.trees; ++i)
        starts[i + 1] = starts[i] + (asked.tree[i].whole ? asked.tree[i].nodes : 0);
    std::vector<double> sums(starts.back());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < int64_t(sums.size()); ++k) {
            const int64_t i = std::upper_bound(starts.begin(), starts.end(), k) - starts.begin() - 1;
            sums[k] = weigh(asked, asked.tree[i].row + k - starts[i], asked.temperatures[i], nullptr);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < asked.trees; ++i) {
            Judge<T> own(asked, i, space_of_thread(), sums.data() + starts[i]);
            if (asked.tree[i].whole) own.as_a_whole();
            else own.by_level();
        }
    }
}

// The largest number of each row, NaN where a row has one, and the lowest id that has it.
template <typename T>
void survey(const T* logits, int64_t rows, int64_t stride, int64_t width, float* peaks, int64_t* ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const T* x = logits + row * stride;
        float peak = -std::numeric_limits<float>::infinity();
        int64_t best = 0;
        bool sound = true;
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
                best = first;
            }
        }
        while (best + 1 < width && number(x + best) != peak) ++best;
        peaks[row] = sound ? peak : std::numeric_limits<float>::quiet_NaN();
        ids[row] = sound ? best : 0;
    }
}

}  // namespace

#define EXPORTED(type, name)                                                                                            \
    extern "C" void survey_##name(const void* logits, int64_t rows, int64_t stride, int64_t width, float* peaks,        \
                                  int64_t* ids, int threads) {                                                          \
        survey((const type*)logits, rows, stride, width, peaks, ids, threads);                                          \
    }                                                                                                                   \
    extern "C" void judge_##name(const void* asked, int threads) { judge(*(const Asked<type>*)asked, threads); }

EXPORTED(float, float32)
EXPORTED(uint16_t, bfloat16)
