#include "life_tables.hpp"

#include <algorithm>
#include <cmath>

namespace kvactors {
namespace {

constexpr double kPseudo = 10;        // observations that a class borrows from its parent
constexpr u32 kEvery = 32;            // requests between two computations of the densities
constexpr double kHalfLife = 16384;   // requests
constexpr double kHeaviest = 1e9;     // weight at which all tables are scaled down

using Edges = std::array<double, LifeTables::kBins + 1>;

Edges edges() {
    Edges result{};
    for (u32 j = 1; j <= LifeTables::kBins; ++j) result[j] = std::pow(2.0, (j - 1) / 2.0);
    return result;
}

const Edges kEdges = edges();

std::array<double, LifeTables::kBins> prior() {
    std::array<double, LifeTables::kBins> result{};
    for (u32 j = 0; j < LifeTables::kBins; ++j)
        result[j] = 1 - std::exp(-0.05 * (kEdges[j + 1] - kEdges[j]) / (kEdges[j] + 10));
    return result;
}

const std::array<double, LifeTables::kBins> kPrior = prior();

// Without fused operations, so that both versions have the same result.
KVACTORS_WIDE void draw_towards(const double* above, const double* returned, const double* reached, double pseudo, double* chance) {
    for (u32 j = 0; j < LifeTables::kBins; ++j)
        chance[j] = (std::max(0.0, returned[j]) + pseudo * above[j]) / (std::max(0.0, reached[j]) + pseudo);
}

u32 level(double value, std::initializer_list<double> bounds) {
    u32 k = 0;
    for (const double bound : bounds) k += value >= bound;
    return k;
}

}  // namespace

LifeTables::LifeTables(bool inverted, u64 first) : inverted_(inverted), first_(first), tables_(kClasses), chance_(kClasses), density_(kClasses) {
    up_[0] = kNil;
    up_[1] = 0;
    for (u32 last = 0; last < 2; ++last)
        for (u32 uses = 0; uses < kUses; ++uses) {
            const u32 by_use = 2 + last * kKind + uses * kUse;
            up_[by_use] = last;
            for (u32 hint = 1; hint <= kHints; ++hint) up_[by_use + kUse - hint] = by_use;
            for (u32 gap = 0; gap < kGaps; ++gap) {
                const u32 by_gap = by_use + 1 + gap * (1 + kOutputs);
                up_[by_gap] = by_use;
                for (u32 output = 0; output < kOutputs; ++output) up_[by_gap + 1 + output] = by_gap;
            }
        }
}

u32 LifeTables::bin_of(double age) {
    if (!(age >= 1)) return 0;
    return u32(std::upper_bound(kEdges.begin() + 1, kEdges.begin() + kBins, age) - kEdges.begin() - 1);
}

double LifeTables::start_of(u32 bin) { return kEdges[bin]; }

u32 LifeTables::hint_of(bool ends, double returns_in) {
    if (ends) return 1;
    return returns_in < 0 ? 0 : 2 + level(returns_in, {8, 32, 128, 512});
}

u32 LifeTables::class_of(bool last, u32 uses, double gap, long long output, u32 hint) {
    const u32 by_use = 2 + u32(last) * kKind + level(uses, {2, 3, 5, 9, 33}) * kUse;
    if (hint != 0) return by_use + kUse - hint;
    const u32 by_gap = by_use + 1 + level(gap, {0, 8, 32, 128}) * (1 + kOutputs);
    return output < 0 ? by_gap : by_gap + 1 + level(double(output), {64, 256, 1024});
}

void LifeTables::add(Row Table::*row, u32 cls, u32 bin, double weight) {
    for (; cls != kNil; cls = up_[cls]) (tables_[cls].*row)[bin] += weight;
}

void LifeTables::begin(u32 cls) {
    used_[cls] = true;
    if (up_[cls] != kNil) {
        if (!used_[up_[cls]]) begin(up_[cls]);
        if (stale_[up_[cls]]) rank(up_[cls]);  // by the chances so far
        draw(up_[cls]);
    }
    draw(cls);
    stale_[cls] = true;
}

void LifeTables::count_request() {
    if (requests_++ % kEvery == 0) {
        for (u32 cls = 0; cls < kClasses; ++cls)  // parents come first
            if (used_[cls]) draw(cls), stale_[cls] = true;
        ++computed_;
    }
    weight_ *= std::exp2(1 / kHalfLife);
    if (weight_ < kHeaviest) return;
    for (Table& table : tables_)
        for (u32 j = 0; j < kBins; ++j) table.reached[j] /= weight_, table.returned[j] /= weight_;
    weight_ = 1;
}

// A class is drawn towards its parent, as if `kPseudo` of its runs had behaved like those of the
// parent. Before anything is observed the chance falls with the age, which is the order of LRU.
void LifeTables::draw(u32 cls) {
    const Row& above = up_[cls] == kNil ? kPrior : chance_[up_[cls]];
    draw_towards(above.data(), tables_[cls].returned.data(), tables_[cls].reached.data(), kPseudo * weight_, chance_[cls].data());
}

// The best stop after each bin is where the ratio no longer rises. From the last bin backwards, a
// stretch of bins absorbs those after it as long as their ratio is the better one, which makes the
// whole linear in the number of bins.
void LifeTables::rank(u32 cls) {
    struct Stretch {
        double gain, cost, survival;
    };
    stale_[cls] = false;
    const Row& chance = chance_[cls];
    Stretch stack[kBins];
    u32 depth = 0;
    for (u32 j = kBins; j-- > 0;) {
        const double p = std::min(1.0, chance[j]);
        Stretch now{p, (1 - p / 2) * (kEdges[j + 1] - kEdges[j]), 1 - p};
        while (depth != 0 && stack[depth - 1].gain * now.cost > now.gain * stack[depth - 1].cost) {
            const Stretch& next = stack[--depth];
            now = {now.gain + now.survival * next.gain, now.cost + now.survival * next.cost, now.survival * next.survival};
        }
        stack[depth++] = now;
        density_[cls][j] = (inverted_ ? -1 : 1) * now.gain / now.cost;
    }
}

double LifeTables::chance_of_return(u32 cls, u32 from, u32 to) const {
    double stays = 1;
    for (u32 j = from; j <= to; ++j) stays *= 1 - std::min(1.0, chance_[cls][j]);
    return 1 - stays;
}

}  // namespace kvactors
