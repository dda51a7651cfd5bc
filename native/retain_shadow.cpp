// The guard of RETAIN: an exact LRU of the same size, in which every run has its place already.
//
// The shadow has the most recently used blocks, as many as are resident at the moment, so it
// shrinks and grows with the tier. Blocks that it has and the tier lacks are displaced. Each of
// them can cost one hit. The model may displace as many as its record allows (`limit`): hits that
// the shadow did not have earn trust, and hits of the shadow alone cost it.
#include <algorithm>
#include <stdexcept>

#include "retain.hpp"

namespace kvactors {
namespace {

// The policy may lose this share of the blocks against LRU. A part of that is granted as trust
// without a hit: `Guard::most` at first, a quarter of the part each time trust is used up, and
// `Guard::most` again when it is full.
constexpr double kLoss = 0.002, kLeast = 0.036;

// Blocks that are due before the shadow has evicted them: so many times those that are moved, and
// some more. The host tier evicts as many at the same time, and those of the next request.
constexpr u64 kAhead = 2, kAheadMore = 32;
constexpr u32 kAheadRuns = 64;

}  // namespace

void Retention::begin_trust() {
    trust_ = guard_.initial;
    share_ = guard_.most;
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

// Moves the edge of the shadow until it has as many blocks as the tier.
void Retention::settle_edge() {
    while (edge_ != kNil && younger_ + edge_inside_ != resident_) {
        displaced_ -= displaced(edge_);
        const u64 all = younger_ + edge_inside_;
        if (all > resident_) {
            edge_inside_ -= std::min(edge_inside_, all - resident_);
        } else {
            edge_inside_ = std::min<u64>(runs_[edge_].total, edge_inside_ + resident_ - all);
        }
        displaced_ += displaced(edge_);
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
    if (edge_ == kNil || displaced_ + ahead < limit()) return;
    u64 passed = edge_inside_;
    u32 run = edge_;
    for (u32 steps = 0; passed < ahead && run != kNil && steps < kAheadRuns; ++steps) {
        run = runs_[run].younger;
        if (run != kNil) passed += runs_[run].total;
    }
    due_ = run == kNil ? ~u64(0) : runs_[run].order;
}

u64 Retention::limit() const {
    if (trust_ <= 0) return 0;
    const double earned = guard_.slope * std::max(0.0, trust_ - guard_.initial);
    double granted = guard_.slope * std::min(trust_, guard_.initial);
    if (guard_.share != 0) granted = std::min(granted, guard_.share * double(resident_));
    return u64(granted + earned);
}

void Retention::judge(u32 touched, u32 hits, u32 shadow_hits) {
    ++counts_.requests;
    counts_.touched += touched;
    counts_.hits += hits;
    counts_.shadow_hits += shadow_hits;
    const double before = trust_;
    trust_ += share_ * kLoss * double(touched) + hits - double(shadow_hits);
    if (before > 0 && trust_ <= 0) share_ = std::max(kLeast, share_ / 4);
    // Beyond the size of the tier more trust would only delay the answer to a change.
    const double full = guard_.initial + double(resident_);
    if (trust_ < full) return;
    trust_ = full;
    share_ = guard_.most;
}

}  // namespace kvactors
