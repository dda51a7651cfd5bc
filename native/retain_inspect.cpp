// Counts and sizes of RETAIN, and the check of all that it keeps.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "retain.hpp"

namespace kvactors {

RetentionCounts Retention::counts() const {
    RetentionCounts result = counts_;
    result.runs = run_places_.used();
    result.ghosts = by_key_.used();
    result.resident = resident_;
    result.displaced = displaced_;
    result.limit = limit_;
    return result;
}

std::size_t Retention::bytes() const {
    return sizeof(*this) + rows_.bytes() + runs_.capacity() * sizeof(Run) + ghosts_.capacity() * sizeof(Ghost) + by_key_.bytes() +
           run_places_.bytes() + ghost_places_.bytes() +
           buckets_.size() * sizeof(List);
}

void Retention::check() const {
    const auto expect = [](bool holds, const char* what) {
        if (!holds) throw std::runtime_error(std::string("retention is damaged: ") + what);
    };
    u64 total = 0, held = 0, away = 0, risk = 0, in = 0, filed = 0, lost = 0, runs = 0, ghosts = 0, before = 0;
    double time = 0;
    u32 older = kNil, bin = LifeTables::kBins;
    for (u32 id = first_; id != kNil; older = id, id = runs_[id].younger) {
        const Run& run = runs_[id];
        expect(run.older == older && run.order > before && run.time >= time, "order of runs");
        expect(run.bin <= bin && (run.bin == bin || bins_[run.bin].time == run.time), "order of bins");
        while (bin > run.bin) --bin, expect(bins_[bin].first == (bin == run.bin ? id : kNil), "first run of a bin");
        expect(run.total != 0 && run.held + run.ghosts <= run.total, "blocks of a run");
        expect(run.lost == (run.ghosts == run.total), "lost run");
        expect(run.held != 0 || (run.tail == kNil && !run.filed), "run without resident blocks");
        if (run.tail != kNil) {
            u32 length = 0;
            for (u32 at = run.tail; at != kNil && row(at).run == id; at = row(at).parent) length += row(at).held;
            expect(holes_ ? length <= run.held : length == run.held, "resident blocks of a run");
            expect(run.filed == (row(run.tail).listed && row(run.tail).children == 0), "run that can be shortened");
        } else {
            expect(!run.filed, "filed run without a tail");
        }
        u32 known = 0;
        for (u32 ghost = run.first_ghost; ghost != kNil; ghost = ghosts_[ghost].after) {
            // Two blocks may have one key, as one that was computed again while its salt was being forgotten.
            const u32 found = find_ghost(ghosts_[ghost].key);
            expect(ghosts_[ghost].run == id && found != kNil && ghosts_[found].key == ghosts_[ghost].key, "ghost");
            ++known;
        }
        expect(known == run.ghosts, "ghosts of a run");
        before = run.order;
        time = run.time;
        total += run.total;
        held += run.held;
        away += displaced(id);
        risk += displaced(id) * u64(run.risk);
        in += inside(id);
        filed += run.filed;
        lost += run.lost;
        ghosts += run.ghosts;
        ++runs;
    }
    while (bin-- > 0) expect(bins_[bin].first == kNil, "empty bin");
    expect(older == last_, "youngest run");
    expect(runs == run_places_.used() && ghosts == by_key_.used() && lost == lost_runs_, "number of runs");
    expect(held == resident_ && away == displaced_ && risk == at_risk_, "resident and displaced blocks");
    expect(in == std::min(total, resident_), "size of the shadow");
    for (u32 bucket = 0; bucket < kBuckets; ++bucket) {
        u64 order = 0;
        for (u32 id = buckets_[bucket].first; id != kNil; id = runs_[id].after, --filed) {
            expect(runs_[id].filed && bucket_of(runs_[id]) == bucket && runs_[id].order > order, "order of a bucket");
            order = runs_[id].order;
        }
        const u32 cls = bucket / LifeTables::kBins;
        const bool filled = (ranks_[bucket % LifeTables::kBins].filled[cls / 64] >> cls % 64 & 1) != 0;
        expect((buckets_[bucket].first != kNil) == filled, "filled bucket");
    }
    check_ranks();
    expect(filed == 0, "runs in buckets");
}

// The best buckets are those that a look at all of them finds.
void Retention::check_ranks() const {
    for (u32 of = 0; of < LifeTables::kBins; ++of) {
        const Rank& bin = ranks_[of];
        bool any = false;
        for (u32 cls = 0; cls < LifeTables::kClasses; ++cls) {
            const u32 first = buckets_[cls * LifeTables::kBins + of].first;
            if (first == kNil) continue;
            any = true;
            if ((stale_ >> of & 1) != 0 || ranked_ != tables_->computed()) continue;
            const double density = tables_->density(cls, of);
            const u32 best = buckets_[bin.best * LifeTables::kBins + of].first;
            if (best == kNil || density < bin.density || (density == bin.density && runs_[first].order < runs_[best].order))
                throw std::runtime_error("retention is damaged: best bucket of a bin");
        }
        if (any != ((occupied_ >> of & 1) != 0)) throw std::runtime_error("retention is damaged: occupied bin");
    }
}

}  // namespace kvactors
