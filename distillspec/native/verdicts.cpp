// Verdicts on drafted trees, and maxima of rows of logits, on CPUs. Called by way of verdict_kernel.py.

#include "distributions.h"

namespace {

constexpr double SMALL = std::numeric_limits<float>::min();

// As in verdict_kernel.py.
struct Group {
    int64_t parent, first, count;  // node that it continues, −1: the text. Its nodes are nodes[first], …
    const float* q;                // what they were drawn from, null: deterministic
    const int64_t* ids;            // the token of each column in ascending order, null: the same number
    int64_t width;
};

struct Tree {
    int64_t row;            // of the text's logits. Those of node i are row + 1 + i
    int64_t first, nodes;   // of its tokens
    int64_t group, groups;  // its groups: groups[group], …
    int64_t way;            // as in `Way`
};

enum Way { BY_LEVEL, AS_A_WHOLE, FROM_THE_LEAVES, BY_CHOICE };

template <typename T>
struct Asked {
    Rows<T> rows;
    int64_t trees, most;  // most: nodes of the largest tree
    const Tree* tree;
    const Group* group;
    const int64_t *nodes, *tokens;
    const Policy* policies;      // [trees]
    const double *accept, *own;  // [rows] and [trees] in [0, 1). A node's is that of its row, which are behind the tree's
    const int32_t* keys;         // of noise, two a row, for trees by choice
    int64_t* found;              // [trees, 1 + most]: the next token, then the accepted nodes, and −1
};

// A drafted child. q: its probability by what earlier siblings leave of its group's distribution, which is `left`.
struct Sibling {
    int64_t child, token, column;
    double left, q;
};

struct Space {
    std::vector<std::vector<float>> levels;  // a distribution for each node on a path
    std::vector<double> blocks;

    float* level(int64_t depth, int64_t width) {
        if (int64_t(levels.size()) <= depth) levels.resize(depth + 1);
        levels[depth].resize(width);
        return levels[depth].data();
    }
};

inline Space& space_of_thread() {
    static thread_local Space own;
    return own;
}

template <typename T>
struct Judge {
    const Asked<T>& asked;
    const Tree& tree;
    const Policy& policy;
    const double own, *accept;
    const int64_t* tokens;
    int64_t* found;
    Space& space;
    float* p;            // [width], not normalised
    double* blocks;      // [width / BLOCK], sums of p
    const Kept* kept;    // [nodes], of each row, for chains that are verified as a whole

    Judge(const Asked<T>& all, int64_t i, Space& own_space, const Kept* known)
        : asked(all), tree(all.tree[i]), policy(all.policies[i]), own(all.own[i]), accept(all.accept + tree.row + 1),
          tokens(all.tokens + tree.first), found(all.found + i * (1 + all.most)), space(own_space), kept(known) {
        space.blocks.resize((asked.rows.width + BLOCK - 1) / BLOCK);
        p = space.level(0, asked.rows.width);
        blocks = space.blocks.data();
        std::fill(found, found + 1 + asked.most, -1);
    }

    const Group& group(int64_t i) const { return asked.group[tree.group + i]; }

    // Block verification: see serving/decoding/block_verification.py.
    void as_a_whole() {
        std::vector<double> weights(1 + tree.nodes, 1.0);
        for (int64_t i = 0; i < tree.nodes; ++i) {
            const double at = weight_of(asked.rows, tree.row + i, policy.temperature, kept[i], tokens[i]) / kept[i].mass;
            const double q = group(i).q[column_of(group(i).ids, group(i).width, tokens[i])];
            weights[i + 1] = std::min(1.0, weights[i] * at / std::max(q, SMALL));
        }
        int64_t taken = tree.nodes;
        for (; taken > 0; --taken) {
            double chance = weights[taken];
            if (taken < tree.nodes) {
                const double above = surplus(taken, weights[taken] / kept[taken].mass);
                const double left = above + (1 - weights[taken]);
                chance = left > 0 ? above / left : 1.0;
            }
            if (accept[taken - 1] < chance) break;
        }
        for (int64_t i = 0; i < taken; ++i) found[1 + i] = i;
        if (taken == tree.nodes) {
            load_row(taken - 1);
        } else {
            spread(asked.rows, tree.row + taken, policy.temperature, kept[taken], p);
            // w · p − q, in units of p. Where rounding leaves nothing, w · p = q up to rounding.
            if (!subtract(group(taken), kept[taken].mass / weights[taken], {}))
                spread(asked.rows, tree.row + taken, policy.temperature, kept[taken], p);
        }
        draw();
    }

    // Turn p into what the policy keeps behind a node, −1: the text. Return its mass.
    double load_row(int64_t node) {
        const int64_t row = tree.row + 1 + node;
        if (policy.top_k <= 0 && policy.top_p >= 1 && policy.min_p <= 0)
            return weigh(asked.rows, row, policy.temperature, p);
        const Kept own = keep(asked.rows, row, policy);
        spread(asked.rows, row, policy.temperature, own, p);
        return own.mass;
    }

    // Return Σ max(0, share · p − q) behind `taken` tokens, for p in units of its row.
    double surplus(int64_t taken, double share) {
        const Group& next = group(taken);
        double above = 0;
        if (!next.ids) {
            spread(asked.rows, tree.row + taken, policy.temperature, kept[taken], p);
            for (int64_t c = 0; c < asked.rows.width; ++c) above += std::max(0.0, p[c] * share - next.q[c]);
            return above;
        }
        const T* logits = asked.rows.row(tree.row + taken);
        const float peak = asked.rows.peaks[tree.row + taken], scale = 1 / policy.temperature;
        double known = 0;
        for (int64_t c = 0; c < next.width; c += LANES) {
            const int64_t some = std::min<int64_t>(LANES, next.width - c);
            Vec x = {};
            for (int64_t i = 0; i < some; ++i) x[i] = number(logits + next.ids[c + i]);
            const Vec e = exponential((x - peak) * scale);
            for (int64_t i = 0; i < some; ++i) {
                const double own = kept[taken].has(x[i], next.ids[c + i]) ? e[i] : 0;
                known += own;
                above += std::max(0.0, own * share - next.q[c + i]);
            }
        }
        return above + std::max(0.0, kept[taken].mass - known) * share;
    }

    // Level by level: see `verify_tree` in serving/decoding/reference_verification.py.
    void by_level() {
        for (int64_t at = -1, depth = 1;; ++depth) {
            const int64_t child = accepted(at, load_row(at));
            if (child < 0) break;
            found[depth] = at = child;
        }
        draw();
    }

    // From the leaves to the root: see serving/decoding/traversal.py. Returns true if the accepted path, of which `depth`
    // nodes are known, ends at a node or below it.
    bool from_the_leaves(int64_t node, int64_t depth, double weight) {
        p = space.level(depth, asked.rows.width);
        double mass = load_row(node);
        for (int64_t i = 0; i < tree.groups; ++i) {
            const Group& tried = group(i);
            if (tried.parent != node) continue;
            std::vector<int64_t> gone;
            for (int64_t k = 0; k < tried.count; ++k) {
                const Sibling own = sibling(tried, k, gone);
                const double path = own.q > 0 ? std::min(1.0, weight * p[own.token] / mass / own.q) : 0;
                if (path > 0) {
                    found[1 + depth] = own.child;
                    if (from_the_leaves(own.child, depth + 1, path)) return true;
                    p = space.level(depth, asked.rows.width);
                }
                // p becomes max(0, w · p − q), here in units of p.
                const double rest = weight > 0 ? reject(tried, own, mass / weight, gone) : 0;
                if (rest > 0) {
                    const double above = rest * weight / mass;
                    weight = above / (above + 1 - weight);
                    mass = rest;
                } else {  // rounding leaves nothing
                    weight = weight >= 1;
                }
            }
        }
        if (node >= 0 && !(accept[node] < weight)) return false;
        std::fill(found + 1 + depth, found + 1 + asked.most, -1);
        draw();
        return true;
    }

    // The target's own token is known behind each node (serving/decoding/noise.py): accept the child that is this token.
    void by_choice() {
        for (int64_t at = -1, depth = 1;; ++depth) {
            found[0] = chosen(at);
            int64_t child = -1;
            for (int64_t i = 0; i < tree.groups && child < 0; ++i) {
                const int64_t* nodes = asked.nodes + group(i).first;
                for (int64_t k = 0; group(i).parent == at && k < group(i).count && child < 0; ++k)
                    if (tokens[nodes[k]] == found[0]) child = nodes[k];
            }
            if (child < 0) return;
            found[depth] = at = child;
        }
    }

    // Return the token that the noise of a row chooses.
    int64_t chosen(int64_t node) {
        load_row(node);
        return best_with_noise(p, asked.rows.width, nullptr, asked.keys + 2 * (tree.row + 1 + node));
    }

    // Return the accepted child of a node, −1 for none. `p`, of this mass, becomes what is left.
    int64_t accepted(int64_t at, double mass) {
        for (int64_t i = 0; i < tree.groups; ++i) {
            const Group& tried = group(i);
            if (tried.parent != at) continue;
            std::vector<int64_t> gone;
            for (int64_t k = 0; k < tried.count; ++k) {
                const Sibling own = sibling(tried, k, gone);
                if (accept[own.child] * own.q < p[own.token] / mass) return own.child;
                const double rest = reject(tried, own, mass, gone);
                if (rest > 0) mass = rest;
            }
        }
        return -1;
    }

    // Return child k of a group, whose siblings in the columns `gone` were rejected.
    Sibling sibling(const Group& tried, int64_t k, const std::vector<int64_t>& gone) const {
        const int64_t child = asked.nodes[tried.first + k], token = tokens[child];
        if (!tried.q) return {child, token, 0, 1.0, 1.0};
        const int64_t column = column_of(tried.ids, tried.width, token);
        const double left = gone.empty() ? 1.0 : left_of(tried, gone);
        return {child, token, column, left, tried.q[column] / left};
    }

    // Turn p into max(0, p − scale · q), and q into what it is without the child. Return the mass of p. Where rounding
    // leaves none, p was scale · q up to rounding, and stays.
    double reject(const Group& tried, const Sibling& child, double scale, std::vector<int64_t>& gone) {
        if (!tried.q) return take_out(child.token);
        const double rest = subtract(tried, scale / child.left, gone);
        if (!(rest > 0)) restore(tried, scale / child.left, gone);
        gone.push_back(child.column);
        return rest;
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
        return mass_of(p, asked.rows.width, blocks);
    }

    // Turn p into scale · q, q without columns that are gone.
    void restore(const Group& tried, double scale, const std::vector<int64_t>& gone) {
        for (int64_t c = 0; c < tried.width; ++c) p[tried.ids ? tried.ids[c] : c] = scale * tried.q[c];
        for (const int64_t c : gone) p[tried.ids ? tried.ids[c] : c] = 0;
    }

    // Take a token out of p. Return the mass that is left. If there is none, the token stays.
    double take_out(int64_t token) {
        const float before = p[token];
        p[token] = 0;
        const double rest = mass_of(p, asked.rows.width, blocks);
        if (!(rest > 0)) p[token] = before;
        return rest;
    }

    void draw() {
        const double mass = mass_of(p, asked.rows.width, blocks);
        found[0] = drawn(p, asked.rows.width, blocks, mass, own);
    }
};

template <typename T>
void judge(const Asked<T>& asked, int threads) {
    std::vector<int64_t> starts(1 + asked.trees);  // where a tree's rows begin among those that are looked at first
    for (int64_t i = 0; i < asked.trees; ++i)
        starts[i + 1] = starts[i] + (asked.tree[i].way == AS_A_WHOLE ? asked.tree[i].nodes : 0);
    std::vector<Kept> kept(starts.back());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < int64_t(kept.size()); ++k) {
            const int64_t i = std::upper_bound(starts.begin(), starts.end(), k) - starts.begin() - 1;
            kept[k] = keep(asked.rows, asked.tree[i].row + k - starts[i], asked.policies[i]);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < asked.trees; ++i) {
            Judge<T> own(asked, i, space_of_thread(), kept.data() + starts[i]);
            if (asked.tree[i].way == AS_A_WHOLE) own.as_a_whole();
            else if (asked.tree[i].way == FROM_THE_LEAVES) own.from_the_leaves(-1, 0, 1.0);
            else if (asked.tree[i].way == BY_CHOICE) own.by_choice();
            else own.by_level();
        }
    }
}

// See `peak_of`.
template <typename T>
void survey(const T* logits, int64_t rows, int64_t stride, int64_t width, float* peaks, int64_t* ids, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; ++row) {
        peaks[row] = peak_of(logits + row * stride, width, ids[row]);
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
