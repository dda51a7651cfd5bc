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

constexpr double kSlope = 17;    // blocks that may be displaced for each hit of trust
constexpr double kInitial = 16;  // trust before anything is observed
// The policy may lose this share of the blocks against LRU. A part of that is granted as trust
// without a hit: `kMost` at first, a quarter of the part each time trust is used up, and `kMost`
// again when it is full.
constexpr double kLoss = 0.002, kMost = 0.9, kLeast = 0.036;

}  // namespace

void Retention::begin_trust() {
    trust_ = kInitial;
    share_ = kMost;
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
            edge_ = next_younger(edge_);
            edge_inside_ = runs_[edge_].total;
            younger_ -= edge_inside_;
        } else if (left < resident_) {
            const u32 older = next_older(edge_);
            if (older == kNil) return;
            younger_ += runs_[edge_].total;
            edge_ = older;
            edge_inside_ = 0;
        }
    }
}

u64 Retention::limit() const { return trust_ <= 0 ? 0 : u64(trust_ * kSlope); }

void Retention::judge(u32 touched, u32 hits, u32 shadow_hits) {
    ++counts_.requests;
    counts_.touched += touched;
    counts_.hits += hits;
    counts_.shadow_hits += shadow_hits;
    const double before = trust_;
    trust_ += share_ * kLoss * double(touched) + hits - double(shadow_hits);
    if (before > 0 && trust_ <= 0) share_ = std::max(kLeast, share_ / 4);
    // Beyond the size of the tier more trust would only delay the answer to a change.
    if (trust_ < kInitial + double(resident_)) return;
    trust_ = kInitial + double(resident_);
    share_ = kMost;
}

}  // namespace kvactors
