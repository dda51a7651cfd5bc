// Blocks and ghosts, runs by age, and the choice of the victim. The shadow is in retain_shadow.cpp.
#include "retain.hpp"

#include <algorithm>
#include <stdexcept>

namespace kvactors {
namespace {

constexpr std::size_t kLostRuns = 32768;       // runs without resident blocks that are remembered
constexpr std::size_t kGhosts = 1 << 18;       // blocks of those
constexpr u64 kForgotten = 4096;               // of them in one call
constexpr std::size_t kMoves = 4096;           // runs that change their bins in one call
constexpr unsigned kRowShift = 12;
constexpr u32 kDepthBits = 24;

}  // namespace

Retention::Retention(std::shared_ptr<LifeTables> tables, std::size_t capacity, const Guard& guard, bool observes)
    : tables_(std::move(tables)), observes_(observes), guard_(guard), rows_(1, kRowShift), by_key_(kGhosts, false), buckets_(kBuckets) {
    rows_.reserve(capacity, false);
    // The memory is used as it is needed, and nothing is copied while it grows.
    runs_.reserve(2 * kLostRuns);
    ghosts_.reserve(kGhosts);
    begin_trust();
}

// ---------------------------------------------------------------- blocks and ghosts

u32 Retention::find_ghost(u64 key) const {
    return by_key_.find(hash_of(key), [&](u32 ghost) { return ghosts_[ghost].key == key; });
}

void Retention::add(u32 id, u32 parent, u64 key) {
    if (id >= rows_.rows()) rows_.reserve(std::size_t(id) + 1, false);
    row(id) = Row{key, kNil, parent, 0, 0, false, false, false};
    by_key_.prefetch(hash_of(key));
}

void Retention::recall(u32 id) {
    if (by_key_.used() == 0) return;
    const u32 ghost = find_ghost(row(id).key);
    if (ghost == kNil) return;
    row(id).run = ghosts_[ghost].run;
    row(id).uses = ghosts_[ghost].uses;
    drop_ghost(ghost);
    settle_lost(row(id).run);
}

void Retention::drop_ghost(u32 ghost) {
    const Ghost& gone = ghosts_[ghost];
    Run& run = runs_[gone.run];
    (gone.before == kNil ? run.first_ghost : ghosts_[gone.before].after) = gone.after;
    if (gone.after != kNil) ghosts_[gone.after].before = gone.before;
    --run.ghosts;
    by_key_.erase(hash_of(gone.key), ghost);
    free_ghosts_.push_back(ghost);
}

void Retention::remove(u32 id) {
    mark_gone(id);
    const Row& gone = row(id);
    const u32 run = gone.run;
    if (run == kNil) return;
    u32 ghost = u32(ghosts_.size());
    if (free_ghosts_.empty()) {
        ghosts_.emplace_back();
    } else {
        ghost = free_ghosts_.back();
        free_ghosts_.pop_back();
    }
    Run& of = runs_[run];
    ghosts_[ghost] = Ghost{gone.key, run, kNil, of.first_ghost, gone.uses};
    if (of.first_ghost != kNil) ghosts_[of.first_ghost].before = ghost;
    of.first_ghost = ghost;
    ++of.ghosts;
    by_key_.insert(hash_of(gone.key), ghost);
    settle_lost(run);
}

// Whether every block of the run is a ghost may have changed.
void Retention::settle_lost(u32 id) {
    Run& run = runs_[id];
    const bool lost = run.ghosts == run.total;
    if (lost == run.lost) return;
    run.lost = lost;
    if (lost) {
        run.lost_before = lost_.last;
        run.lost_after = kNil;
        (lost_.last == kNil ? lost_.first : runs_[lost_.last].lost_after) = id;
        lost_.last = id;
        ++lost_runs_;
    } else {
        (run.lost_before == kNil ? lost_.first : runs_[run.lost_before].lost_after) = run.lost_after;
        (run.lost_after == kNil ? lost_.last : runs_[run.lost_after].lost_before) = run.lost_before;
        --lost_runs_;
    }
}

// Those that were lost first go first, unless the shadow has them: it must be exact.
void Retention::forget() {
    u64 dropped = 0;
    for (u32 tries = 0; tries < 16 && dropped < kForgotten && (lost_runs_ > kLostRuns || by_key_.used() > kGhosts); ++tries) {
        const u32 id = lost_.first;
        if (id == kNil) return;
        if (inside(id) != 0) {  // to the end of the queue
            runs_[id].ghosts += 1, settle_lost(id);
            runs_[id].ghosts -= 1, settle_lost(id);
            continue;
        }
        u32 gone = 0;
        for (; runs_[id].first_ghost != kNil && dropped < kForgotten; ++gone, ++dropped) drop_ghost(runs_[id].first_ghost);
        detach(id, gone, 0);
    }
}

// ---------------------------------------------------------------- runs by age

u32 Retention::next_older(u32 id) const {
    const Run& run = runs_[id];
    if (run.older != kNil) return run.older;
    for (u32 bin = run.bin + 1; bin < LifeTables::kBins; ++bin)
        if (bins_[bin].last != kNil) return bins_[bin].last;
    return kNil;
}

u32 Retention::next_younger(u32 id) const {
    const Run& run = runs_[id];
    if (run.younger != kNil) return run.younger;
    for (u32 bin = run.bin; bin-- > 0;)
        if (bins_[bin].first != kNil) return bins_[bin].first;
    return kNil;
}

void Retention::enter_bin(u32 id, u32 bin) {
    Run& run = runs_[id];
    Bin& list = bins_[bin];
    run.bin = u8(bin);
    run.older = list.last;
    run.younger = kNil;
    if (list.last == kNil) list.time = run.time;
    (list.last == kNil ? list.first : runs_[list.last].younger) = id;
    list.last = id;
}

void Retention::leave_bin(u32 id) {
    const Run& run = runs_[id];
    Bin& list = bins_[run.bin];
    if (run.older == kNil && run.younger != kNil) list.time = runs_[run.younger].time;
    (run.older == kNil ? list.first : runs_[run.older].younger) = run.younger;
    (run.younger == kNil ? list.last : runs_[run.younger].older) = run.older;
}

// From the oldest run on, so that each list stays in the order of last use.
void Retention::advance(double now) {
    if (!(now > now_)) return;
    now_ = now;
    const auto leaves = [&](u32 bin) {
        return bins_[bin].first != kNil && !(now - bins_[bin].time < LifeTables::start_of(bin + 1));
    };
    for (u32 bin = 0; bin + 1 < LifeTables::kBins; ++bin)
        if (leaves(bin)) __builtin_prefetch(&runs_[bins_[bin].first], 1);
    std::size_t moves = 0;
    for (u32 bin = LifeTables::kBins - 1; bin-- > 0;) {
        while (leaves(bin)) {
            const u32 id = bins_[bin].first;
            Run& run = runs_[id];
            if (++moves > kMoves) return;  // the next call continues
            const u32 to = LifeTables::bin_of(now - run.time);
            for (u32 passed = bin + 1; passed <= to && observes_; ++passed) tables_->reach(run.cls, passed);
            const bool filed = run.filed;
            if (filed) unfile(id);
            leave_bin(id);
            enter_bin(id, to);
            if (filed) file(id);
        }
    }
}

// A run of resident blocks, the youngest of all.
u32 Retention::make_run(u32 cls, u64 order, u32 blocks, u32 tail, u32 path) {
    u32 id = u32(runs_.size());
    if (free_runs_.empty()) {
        runs_.emplace_back();
    } else {
        id = free_runs_.back();
        free_runs_.pop_back();
    }
    Run& run = runs_[id];
    run = Run{};
    run.order = order;
    run.time = now_;
    run.total = run.held = blocks;
    run.tail = tail;
    run.path = path;
    run.first_ghost = kNil;
    run.cls = u16(cls);
    tables_->use(cls);
    if (observes_) tables_->reach(cls, 0);
    enter_bin(id, 0);
    resident_ += blocks;
    if (edge_ == kNil) {
        edge_ = id;
        edge_inside_ = blocks;
        younger_ = 0;
    } else {
        younger_ += blocks;
    }
    return id;
}

// `blocks` leave the run, `held` of them resident ones: they are touched again, or forgotten.
void Retention::detach(u32 id, u32 blocks, u32 held) {
    Run& run = runs_[id];
    displaced_ -= displaced(id);
    if (edge_ != kNil && run.order > runs_[edge_].order) younger_ -= blocks;
    run.total -= blocks;
    run.held -= held;
    resident_ -= held;
    if (id == edge_) edge_inside_ -= std::min<u64>(edge_inside_, blocks);
    if (run.held == 0) {
        if (run.filed) unfile(id);
        run.tail = kNil;
    }
    if (run.total == 0) {
        drop_run(id);
        return;
    }
    displaced_ += displaced(id);
    settle_lost(id);
}

void Retention::drop_run(u32 id) {
    if (id == edge_) {
        const u32 younger = next_younger(id);
        if (younger != kNil) {
            edge_ = younger;
            edge_inside_ = runs_[younger].total;
            younger_ -= edge_inside_;
        } else {
            edge_ = next_older(id);
            edge_inside_ = younger_ = 0;
        }
    }
    Run& run = runs_[id];
    if (run.lost) {
        run.ghosts = 1;  // not all of none
        settle_lost(id);
    }
    leave_bin(id);
    if (current_ == id) current_ = kNil;
    if (oldest_ == id) oldest_ = kNil;
    free_runs_.push_back(id);
}

// ---------------------------------------------------------------- touches

void Retention::touch(const u32* ids, u32 count, const Visit& visit) {
    if (count == 0) return;
    u32 known = 0;
    while (known < count && row(ids[known]).run != kNil) ++known;
    double gap = -1;
    if (known != 0) {
        const Run& continued = runs_[row(ids[known - 1]).run];
        if (2 * u64(known) > continued.path && continued.time <= visit.acquired) gap = visit.acquired - continued.time;
    }
    u32 hits = 0, shadow_hits = 0;
    for (u32 x = 0; x < count;) {
        const u32 id = row(ids[x]).run;
        u32 end = x, held = 0;
        for (; end < count && row(ids[end]).run == id; ++end) held += row(ids[end]).held;
        if (id != kNil) {
            const Run& run = runs_[id];
            if (run.time <= visit.acquired) {  // else another request has used it since
                const u32 bin = LifeTables::bin_of(visit.acquired - run.time);
                if (observes_) tables_->returned(run.cls, bin);
                // It did not reach the bins that it has entered while the request ran.
                if (observes_ && end - x == run.total)
                    for (u32 passed = bin + 1; passed <= run.bin; ++passed) tables_->unreach(run.cls, passed);
                hits += std::min(end, std::max(x, visit.hits)) - x;
                const u32 within = std::min(end, std::max(x, visit.limit)) - x;
                if (run.order > visit.mark.order) shadow_hits += within;
                else if (run.order == visit.mark.order) shadow_hits += std::min(within, visit.mark.inside);
            }
            detach(id, end - x, held);
        }
        x = end;
    }
    ++serial_;
    const auto class_at = [&](u32 x) {
        return LifeTables::class_of(x + 1 == count, row(ids[x]).uses, gap, visit.output, visit.hint);
    };
    for (u32 x = 0; x < count; ++x) row(ids[x]).uses = u16(std::min(row(ids[x]).uses + 1, 0xffff));
    for (u32 end = count; end > 0;) {  // the deepest first: they are the older ones
        const u32 cls = class_at(end - 1);
        u32 start = end - 1;
        while (start > 0 && class_at(start - 1) == cls) --start;
        const u64 order = (serial_ + 1 << kDepthBits) - 1 - std::min<u32>(start, (1u << kDepthBits) - 1);
        const u32 run = make_run(cls, order, end - start, ids[end - 1], count);
        for (u32 x = start; x < end; ++x) row(ids[x]).run = run, row(ids[x]).held = true, mark_gone(ids[x]);
        end = start;
    }
    settle_edge();
    judge(count, hits, shadow_hits);
    if (observes_) tables_->count_request();
    forget();
}

// A block that became resident without a touch, as by a load that has outlived its request.
void Retention::stray(u32 id) {
    Row& block = row(id);
    if (block.run != kNil) {
        holes_ = holes_ || runs_[block.run].held != 0;
        detach(block.run, 1, 0);
    }
    ++serial_;
    block.run = make_run(LifeTables::class_of(false, std::max<u16>(block.uses, 1), -1, -1, 0), serial_ << kDepthBits, 1, id, 1);
    block.held = true;
    settle_edge();
}

// ---------------------------------------------------------------- runs that can be shortened

void Retention::list(u32 id) {
    Row& block = row(id);
    block.listed = true;
    ++listed_;
    if (block.parent != kNil) {
        Row& parent = row(block.parent);
        if (parent.children++ == 0 && parent.run != kNil && parent.held) {
            const Run& above = runs_[parent.run];
            if (above.filed && above.tail == block.parent) unfile(parent.run);
        }
    }
    if (!block.held) stray(id);
    file_if_free(id);
}

void Retention::unlist(u32 id) {
    Row& block = row(id);
    block.listed = false;
    --listed_;
    if (block.held && runs_[block.run].filed && runs_[block.run].tail == id) unfile(block.run);
    if (block.parent != kNil && --row(block.parent).children == 0) file_if_free(block.parent);
}

void Retention::file_if_free(u32 id) {
    const Row& block = row(id);
    if (!block.listed || !block.held || block.children != 0) return;
    const Run& run = runs_[block.run];
    if (run.tail == id && !run.filed) file(block.run);
}

// A bucket is in the order of last use. A run most often belongs to its end. Otherwise its place is
// looked for from both ends of the bucket, and among the runs before it in its bin.
void Retention::file(u32 id) {
    Run& run = runs_[id];
    const u32 bucket = bucket_of(run);
    List& list = buckets_[bucket];
    u32 late = list.last, early = list.first, beside = run.older;
    u32 before = kNil;
    while (late != kNil) {
        if (runs_[late].order < run.order) {
            before = late;
            break;
        }
        if (runs_[early].order > run.order) {
            before = runs_[early].before;
            break;
        }
        late = runs_[late].before;
        early = runs_[early].after;
        if (beside == kNil) continue;
        if (runs_[beside].filed && runs_[beside].cls == run.cls) {
            before = beside;
            break;
        }
        beside = runs_[beside].older;
    }
    run.filed = true;
    run.before = before;
    run.after = before == kNil ? list.first : runs_[before].after;
    (before == kNil ? list.first : runs_[before].after) = id;
    (run.after == kNil ? list.last : runs_[run.after].before) = id;
    filled_[bucket / 64] |= u64(1) << bucket % 64;
}

void Retention::unfile(u32 id) {
    Run& run = runs_[id];
    const u32 bucket = bucket_of(run);
    List& list = buckets_[bucket];
    (run.before == kNil ? list.first : runs_[run.before].after) = run.after;
    (run.after == kNil ? list.last : runs_[run.after].before) = run.before;
    run.filed = false;
    if (list.first == kNil) filled_[bucket / 64] &= ~(u64(1) << bucket % 64);
}

u32 Retention::victim() {
    if (displaced_ >= limit()) return kNil;
    if (current_ != kNil && runs_[current_].filed) return runs_[current_].tail;
    double lowest = 0;
    u32 best = kNil;
    for (std::size_t word = 0; word < filled_.size(); ++word)
        for (u64 bits = filled_[word]; bits != 0; bits &= bits - 1) {
            const u32 bucket = u32(word * 64) + u32(__builtin_ctzll(bits));
            const double density = tables_->density(bucket / LifeTables::kBins, bucket % LifeTables::kBins);
            const bool tied = best != kNil && density == lowest &&
                              runs_[buckets_[bucket].first].order < runs_[buckets_[best].first].order;
            if (best == kNil || density < lowest || tied) lowest = density, best = bucket;
        }
    if (best == kNil) return kNil;
    // Where the density rises, those that are nearest to the next bin are the better ones.
    const bool rises = tables_->rises(best / LifeTables::kBins, best % LifeTables::kBins);
    current_ = rises ? buckets_[best].last : buckets_[best].first;
    return runs_[current_].tail;
}

u32 Retention::oldest() {
    if (oldest_ != kNil && runs_[oldest_].filed) return runs_[oldest_].tail;
    oldest_ = kNil;
    u32 highest = 0;  // a run in a higher bin is older
    for (std::size_t word = 0; word < filled_.size(); ++word)
        for (u64 bits = filled_[word]; bits != 0; bits &= bits - 1) {
            const u32 bucket = u32(word * 64) + u32(__builtin_ctzll(bits)), bin = bucket % LifeTables::kBins;
            if (bin < highest) continue;
            const u32 first = buckets_[bucket].first;
            if (oldest_ == kNil || bin > highest || runs_[first].order < runs_[oldest_].order) oldest_ = first;
            highest = bin;
        }
    return oldest_ == kNil ? kNil : runs_[oldest_].tail;
}

void Retention::mark_leaving(u32 id) {
    leaving_ += !row(id).leaving;
    row(id).leaving = true;
}

void Retention::mark_gone(u32 id) {
    leaving_ -= row(id).leaving;
    row(id).leaving = false;
}

// The deepest resident block of the run above this one. Those between were lost before it.
u32 Retention::tail_above(u32 id) const {
    const u32 run = row(id).run;
    for (u32 up = row(id).parent; up != kNil && row(up).run == run; up = row(up).parent)
        if (row(up).held) return up;
    return kNil;
}

// The shadow evicts a block too.
void Retention::evicted(u32 id, bool chosen) {
    Row& block = row(id);
    ++(chosen ? counts_.chosen : counts_.oldest);
    if (!block.held) return;
    by_key_.prefetch(hash_of(block.key));  // it is about to become a ghost
    const u32 of = block.run;
    Run& run = runs_[of];
    if (run.filed && run.tail == id) unfile(of);
    block.held = false;
    displaced_ -= displaced(of);
    --run.held;
    displaced_ += displaced(of);
    --resident_;
    if (run.tail == id) {
        run.tail = run.held != 0 ? tail_above(id) : kNil;
        if (run.tail != kNil) file_if_free(run.tail);  // as a listed block has the next one as parent
    }
    settle_edge();
}

// ---------------------------------------------------------------- inspection

RetentionCounts Retention::counts() const {
    RetentionCounts result = counts_;
    result.runs = runs_.size() - free_runs_.size();
    result.ghosts = by_key_.used();
    result.resident = resident_;
    result.displaced = displaced_;
    result.limit = limit();
    return result;
}

std::size_t Retention::bytes() const {
    return sizeof(*this) + rows_.bytes() + runs_.capacity() * sizeof(Run) + ghosts_.capacity() * sizeof(Ghost) + by_key_.bytes() +
           buckets_.size() * sizeof(List);
}

void Retention::check() const {
    const auto expect = [](bool holds, const char* what) {
        if (!holds) throw std::runtime_error(std::string("retention is damaged: ") + what);
    };
    u64 total = 0, held = 0, away = 0, in = 0, filed = 0, lost = 0, runs = 0, ghosts = 0, before = 0;
    double time = 0;
    for (u32 bin = LifeTables::kBins; bin-- > 0;)
        for (u32 id = bins_[bin].first; id != kNil; id = runs_[id].younger) {
            const Run& run = runs_[id];
            expect(run.bin == bin && run.order > before && run.time >= time, "order of runs");
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
                expect(ghosts_[ghost].run == id && find_ghost(ghosts_[ghost].key) == ghost, "ghost");
                ++known;
            }
            expect(known == run.ghosts, "ghosts of a run");
            before = run.order;
            time = run.time;
            total += run.total;
            held += run.held;
            away += displaced(id);
            in += inside(id);
            filed += run.filed;
            lost += run.lost;
            ghosts += run.ghosts;
            ++runs;
        }
    expect(runs == runs_.size() - free_runs_.size() && ghosts == by_key_.used() && lost == lost_runs_, "number of runs");
    expect(held == resident_ && away == displaced_, "resident and displaced blocks");
    expect(in == std::min(total, resident_), "size of the shadow");
    for (u32 bucket = 0; bucket < kBuckets; ++bucket) {
        u64 order = 0;
        for (u32 id = buckets_[bucket].first; id != kNil; id = runs_[id].after, --filed) {
            expect(runs_[id].filed && bucket_of(runs_[id]) == bucket && runs_[id].order > order, "order of a bucket");
            order = runs_[id].order;
        }
        expect((buckets_[bucket].first != kNil) == ((filled_[bucket / 64] >> bucket % 64 & 1) != 0), "filled bucket");
    }
    expect(filed == 0, "runs in buckets");
}

}  // namespace kvactors
