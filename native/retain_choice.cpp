// The choice of the victim of RETAIN: the run of lowest density, of all runs or of those that the
// shadow lacks.
#include "retain.hpp"

namespace kvactors {
namespace {

constexpr u32 kLook = 32;  // runs of a bucket in which the shadow's edge is looked for

}  // namespace

// The bucket of the lowest density in a bin, and of equal ones the one whose first run is older.
void Retention::choose(u32 of) {
    Rank& bin = ranks_[of];
    stale_ &= ~(u64(1) << of);
    bin.best = kNil;
    for (u32 word = 0; word < kWords; ++word)
        for (u64 bits = bin.filled[word]; bits != 0; bits &= bits - 1) {
            const u32 cls = word * 64 + u32(__builtin_ctzll(bits));
            const double density = tables_->density(cls, of);
            if (bin.best != kNil && !(density < bin.density)) {
                if (density > bin.density) continue;
                const auto order = [&](u32 each) { return runs_[buckets_[each * LifeTables::kBins + of].first].order; };
                if (order(cls) > order(bin.best)) continue;
            }
            bin.best = cls;
            bin.density = density;
        }
}

// Without the trust that its choice needs, the model chooses among the blocks that the shadow lacks.
u32 Retention::victim() {
    if (!tables_->has_begun()) return kNil;
    if (current_ != kNil && runs_[current_].filed) {
        if (outside_ ? inside(current_) == 0 : may_displace()) return runs_[current_].tail;
        if (!outside_) return victim_outside();
    }
    outside_ = false;
    if (ranked_ != tables_->computed()) stale_ = ~u64(0);
    ranked_ = tables_->computed();
    for (u64 bits = occupied_ & stale_; bits != 0; bits &= bits - 1) choose(u32(__builtin_ctzll(bits)));
    u32 best = kNil;  // a bin. Of equal densities the one in a higher bin is older.
    for (u64 bits = occupied_; bits != 0; bits &= bits - 1) {
        const u32 bin = u32(__builtin_ctzll(bits));
        if (best == kNil || ranks_[bin].density <= ranks_[best].density) best = bin;
    }
    if (best == kNil) return kNil;
    // Where the density rises, those that are nearest to the next bin are the better ones.
    const u32 cls = ranks_[best].best;
    const List& list = buckets_[cls * LifeTables::kBins + best];
    current_ = tables_->rises(cls, best) ? list.last : list.first;
    next_risk_ = risk_of(runs_[current_]);
    return may_displace() ? runs_[current_].tail : victim_outside();
}

// The youngest run of a bucket that is older than `order`, as far as one looks.
u32 Retention::last_before(const List& list, u64 order) const {
    if (list.first == kNil || runs_[list.first].order >= order) return kNil;
    if (runs_[list.last].order < order) return list.last;
    u32 run = list.first;
    for (u32 steps = 0; steps < kLook && runs_[runs_[run].after].order < order; ++steps) run = runs_[run].after;
    return run;
}

// The best run of a bin that is older than `order`.
u32 Retention::best_before(u32 bin, u64 order) const {
    u32 best = kNil;
    for (u32 word = 0; word < kWords; ++word)
        for (u64 bits = ranks_[bin].filled[word]; bits != 0; bits &= bits - 1) {
            const u32 cls = word * 64 + u32(__builtin_ctzll(bits));
            const u32 run = last_before(buckets_[cls * LifeTables::kBins + bin], order);
            if (run == kNil) continue;
            const double less = best == kNil ? -1 : tables_->density(cls, bin) - tables_->density(runs_[best].cls, bin);
            if (less < 0 || (less == 0 && runs_[run].order > runs_[best].order)) best = run;
        }
    return best;
}

// The best run that the shadow has no block of. LRU would have none of these blocks, so the model
// is free to choose among them. All runs of the bins after that of the shadow's edge are such.
u32 Retention::victim_outside() {
    outside_ = true;
    current_ = kNil;
    if (edge() == kNil) return kNil;
    const u32 of = runs_[edge()].bin;
    double density = 0;
    for (u64 bits = occupied_ >> of << of; bits != 0; bits &= bits - 1) {
        const u32 bin = u32(__builtin_ctzll(bits));
        u32 run = kNil;
        if (bin == of) {
            run = best_before(bin, runs_[edge()].order);
            if (run == kNil) continue;
        } else {
            if ((stale_ >> bin & 1) != 0) choose(bin);
            const u32 cls = ranks_[bin].best;
            const List& list = buckets_[cls * LifeTables::kBins + bin];
            run = tables_->rises(cls, bin) ? list.last : list.first;
        }
        const double here = tables_->density(runs_[run].cls, bin);
        if (current_ != kNil && here > density) continue;
        current_ = run;
        density = here;
    }
    return current_ == kNil ? kNil : runs_[current_].tail;
}

u32 Retention::oldest() {
    if (oldest_ != kNil && runs_[oldest_].filed) return runs_[oldest_].tail;
    oldest_ = kNil;
    if (occupied_ == 0) return kNil;
    const u32 bin = 63 - u32(__builtin_clzll(occupied_));  // a run in a higher bin is older
    for (u32 word = 0; word < kWords; ++word)
        for (u64 bits = ranks_[bin].filled[word]; bits != 0; bits &= bits - 1) {
            const u32 cls = word * 64 + u32(__builtin_ctzll(bits));
            const u32 first = buckets_[cls * LifeTables::kBins + bin].first;
            if (oldest_ == kNil || runs_[first].order < runs_[oldest_].order) oldest_ = first;
        }
    return runs_[oldest_].tail;
}

}  // namespace kvactors
