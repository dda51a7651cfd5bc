// The guard of RETAIN: an exact LRU of the same size, in which every run has its place already.
//
// The shadow has the most recently used blocks, as many as are resident at the moment, so it
// shrinks and grows with the tier. Blocks that it has and the tier lacks are displaced. Each of
// them can cost one hit, and for each of them the tier has one block that the shadow lacks.
//
// Trust is a few blocks, a share of those looked up, and the hits more than those of the shadow. While no
// more blocks are displaced than there is trust, the loss stays within the first two under any
// further requests: a displaced block that costs a hit is no longer displaced. This is the limit at
// first, and where LRU misses only blocks that are new.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "retain.hpp"

namespace kvactors {
namespace {

// The trust of a new cache, and that which a look-up of a block gives. The policy may lose 0.002 of
// the look-ups against LRU, and a few blocks.
constexpr double kFirstTrust = 4, kGranted = 0.0013;
// More blocks than there is trust may be displaced once there is evidence: look-ups beyond the first
// ones, and among the last ones a share of blocks that the shadow had evicted, which is all that the
// model can gain.
constexpr double kStrict = 8000, kExperience = 100000, kMissed = 0.05;
constexpr double kWindow = 1500;  // look-ups that the share is measured over
// The life tables' chance of a return while the shadow has the block, times this, is the risk. The
// sum of the risks stays within the trust.
constexpr double kCaution = 4;

// Blocks that are due before the shadow has evicted them: so many times those that are moved, and
// some more. The host tier evicts as many at the same time, and those of the next request.
constexpr u64 kAhead = 2, kAheadMore = 32;
constexpr u32 kAheadRuns = 64;

}  // namespace

void Retention::begin_trust() {
    trust_ = kFirstTrust;
    limit_ = u64(kFirstTrust);
    risk_limit_ = u64(kFirstTrust * kCertain);
}

Mark Retention::mark() const {
    if (edge_ == kNil) return Mark{};
    return Mark{runs_[edge_].order, u32(edge_inside_)};
}

// Blocks of the run that the shadow has: always the first ones.
u32 Retention::inside(u32 id) const {
    if (edge_ == kNil) return 0;
    if (id == edge_) return u32(edge_inside_);
    return runs_[id].order > runs_[edge_].order ? runs_[id].total : 0;
}

u32 Retention::displaced(u32 id) const {
    const u32 in = inside(id), held = runs_[id].held;
    return in > held ? in - held : 0;
}

// The run of the least recently used block of the shadow.
u32 Retention::edge() const {
    return edge_ == kNil || edge_inside_ != 0 ? edge_ : runs_[edge_].younger;
}

// Moves the edge of the shadow until it has as many blocks as the tier.
void Retention::settle_edge() {
    while (edge_ != kNil && younger_ + edge_inside_ != resident_) {
        discount(edge_);
        const u64 all = younger_ + edge_inside_;
        if (all > resident_) {
            edge_inside_ -= std::min(edge_inside_, all - resident_);
        } else {
            edge_inside_ = std::min<u64>(runs_[edge_].total, edge_inside_ + resident_ - all);
        }
        recount(edge_);
        const u64 left = younger_ + edge_inside_;
        if (left > resident_) {
            edge_ = runs_[edge_].younger;
            edge_inside_ = runs_[edge_].total;
            younger_ -= edge_inside_;
        } else if (left < resident_) {
            const u32 older = runs_[edge_].older;
            if (older == kNil) return;
            younger_ += runs_[edge_].total;
            edge_ = older;
            edge_inside_ = 0;
        }
    }
}

void Retention::expect(u64 blocks) {
    const u64 ahead = kAhead * blocks + kAheadMore;
    due_ = 0;
    const bool full = counts_.chosen + counts_.oldest != 0;  // until now nothing has left both tiers
    if (!full || edge_ == kNil || displaced_ + ahead < limit_) return;
    u64 passed = edge_inside_;
    u32 run = edge_;
    for (u32 steps = 0; passed < ahead && run != kNil && steps < kAheadRuns; ++steps) {
        run = runs_[run].younger;
        if (run != kNil) passed += runs_[run].total;
    }
    due_ = run == kNil ? ~u64(0) : runs_[run].order;
}

u8 Retention::risk_of(const Run& run) const {
    if (edge() == kNil) return kCertain;
    const double chance = tables_->chance_of_return(run.cls, run.bin, runs_[edge()].bin);
    return u8(std::max(1.0, std::ceil(kCertain * std::min(1.0, kCaution * chance))));
}

void Retention::judge(u32 touched, u32 known, u32 hits, u32 shadow_hits) {
    ++counts_.requests;
    counts_.touched += touched;
    counts_.hits += hits;
    counts_.shadow_hits += shadow_hits;
    trust_ += kGranted * double(touched) + hits - double(shadow_hits);
    // Beyond the size of the tier more trust would only delay the answer to a change.
    trust_ = std::min(trust_, double(resident_));
    missed_ = (missed_ + (known - std::min(known, shadow_hits))) * (kWindow / (kWindow + touched));
    const double evidence = std::min(1.0, missed_ / kWindow / kMissed) * std::min(1.0, std::max(0.0, double(counts_.touched) - kStrict) / kExperience);
    const double trust = std::max(0.0, trust_);
    limit_ = u64((1 + (guard_.slope - 1) * evidence) * trust);
    risk_limit_ = u64(kCertain * trust);
}

}  // namespace kvactors
