// Blocks and ghosts, and runs by age. The choice of the victim is in retain_choice.cpp, the shadow in
// retain_shadow.cpp.
#include "retain.hpp"

#include <algorithm>

namespace kvactors {
namespace {

constexpr std::size_t kLostRuns = 32768;       // runs without resident blocks that are remembered
constexpr std::size_t kGhosts = 1 << 18;       // blocks of those
constexpr u64 kForgotten = 4096;               // of them in one call
constexpr std::size_t kMoves = 4096;           // runs that change their bins in one call
constexpr std::size_t kRunsAhead = 4;          // that are asked for before they change their bins
constexpr unsigned kRowShift = 12;
constexpr std::size_t kLarge = 1 << 16;        // blocks of a tier from which on its memory is brought in at once
constexpr u32 kDepthBits = 24;

}  // namespace

Retention::Retention(std::shared_ptr<LifeTables> tables, std::size_t capacity, const Guard& guard, bool touch, bool observes)
    : tables_(std::move(tables)), observes_(observes), at_once_(touch && capacity >= kLarge), guard_(guard), rows_(1, kRowShift),
      runs_(Mapped<Run>(at_once_)), ghosts_(Mapped<Ghost>(at_once_)), run_places_(std::min(2 * kLostRuns, capacity)),
      ghost_places_(std::min(kGhosts, capacity)), by_key_(kGhosts, at_once_, at_once_), buckets_(kBuckets) {
    rows_.reserve(capacity, at_once_);
    runs_.reserve(2 * kLostRuns);  // nothing is copied while they grow
    ghosts_.reserve(kGhosts);
    if (at_once_) {
        bring_in(runs_.data(), runs_.capacity() * sizeof(Run));
        bring_in(ghosts_.data(), ghosts_.capacity() * sizeof(Ghost));
    }
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
    ghost_places_.give(ghost);
}

void Retention::remove(u32 id) {
    mark_gone(id);
    const Row& gone = row(id);
    const u32 run = gone.run;
    if (run == kNil) return;
    const u32 ghost = ghost_places_.take();
    if (ghost == ghosts_.size()) ghosts_.emplace_back();
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
        run.before = lost_.last;
        run.after = kNil;
        (lost_.last == kNil ? lost_.first : runs_[lost_.last].after) = id;
        lost_.last = id;
        ++lost_runs_;
    } else {
        (run.before == kNil ? lost_.first : runs_[run.before].after) = run.after;
        (run.after == kNil ? lost_.last : runs_[run.after].before) = run.before;
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

// The run is the youngest of the bin.
void Retention::enter_bin(u32 id, u32 bin) {
    Run& run = runs_[id];
    run.bin = u8(bin);
    if (bins_[bin].first != kNil) return;
    bins_[bin].first = id;
    bins_[bin].time = run.time;
    next_move_ = std::min(next_move_, next_move(bin));
}

// The time before which no run leaves the bin, or a little earlier: the sum is rounded.
double Retention::next_move(u32 bin) const {
    constexpr double kBefore = 1 - 1e-12;
    return bins_[bin].first == kNil ? kNever : (bins_[bin].time + LifeTables::start_of(bin + 1)) * kBefore;
}

void Retention::leave_bin(u32 id) {
    const Run& run = runs_[id];
    Bin& bin = bins_[run.bin];
    if (bin.first != id) return;
    const bool more = run.younger != kNil && runs_[run.younger].bin == run.bin;
    bin.first = more ? run.younger : kNil;
    if (more) bin.time = runs_[run.younger].time;
}

bool Retention::leaves(u32 bin) const {
    return bins_[bin].first != kNil && !(now_ - bins_[bin].time < LifeTables::start_of(bin + 1));
}

// From the oldest run on, so that the runs of each bin stay neighbours.
void Retention::advance(double now) {
    if (!(now > now_)) return;
    now_ = now;
    if (now < next_move_) return;
    for (u32 bin = 0; bin + 1 < LifeTables::kBins; ++bin)
        if (leaves(bin)) __builtin_prefetch(&runs_[bins_[bin].first], 1);
    std::size_t moves = 0;
    for (u32 bin = LifeTables::kBins - 1; bin-- > 0;) {
        while (leaves(bin)) {
            const u32 id = bins_[bin].first;
            Run& run = runs_[id];
            if (++moves > kMoves) return;  // the next call continues
            // Runs of about one age lie side by side.
            __builtin_prefetch(&runs_[std::min<std::size_t>(id + kRunsAhead, runs_.size() - 1)], 1);
            u32 to = bin;
            do {
                ++to;
                if (observes_) tables_->reach(run.cls, to);
            } while (to + 1 < LifeTables::kBins && !(now - run.time < LifeTables::start_of(to + 1)));
            const bool filed = run.filed;
            if (filed) unfile(id);
            leave_bin(id);
            enter_bin(id, to);
            if (filed) place(id, buckets_[bucket_of(run)].last);  // it is the youngest of the bin
        }
    }
    next_move_ = kNever;
    for (u32 bin = 0; bin + 1 < LifeTables::kBins; ++bin) next_move_ = std::min(next_move_, next_move(bin));
}

// A run of resident blocks, the youngest of all.
u32 Retention::make_run(u32 cls, u64 order, u32 blocks, u32 tail, u32 path) {
    const u32 id = run_places_.take();
    if (id == runs_.size()) runs_.emplace_back();
    Run& run = runs_[id];
    run = Run{};
    run.order = order;
    run.time = now_;
    run.total = run.held = blocks;
    run.tail = tail;
    run.path = path;
    run.first_ghost = kNil;
    run.cls = u16(cls);
    run.risk = kCertain;
    tables_->use(cls);
    if (observes_) tables_->reach(cls, 0);
    run.older = last_;
    run.younger = kNil;
    (last_ == kNil ? first_ : runs_[last_].younger) = id;
    last_ = id;
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
    discount(id);
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
    recount(id);
    settle_lost(id);
}

void Retention::drop_run(u32 id) {
    Run& run = runs_[id];
    if (id == edge_) {
        if (run.younger != kNil) {
            edge_ = run.younger;
            edge_inside_ = runs_[edge_].total;
            younger_ -= edge_inside_;
        } else {
            edge_ = run.older;
            edge_inside_ = younger_ = 0;
        }
    }
    if (run.lost) {
        run.ghosts = 1;  // not all of none
        settle_lost(id);
    }
    leave_bin(id);
    (run.older == kNil ? first_ : runs_[run.older].younger) = run.younger;
    (run.younger == kNil ? last_ : runs_[run.younger].older) = run.older;
    if (current_ == id) current_ = kNil;
    if (oldest_ == id) oldest_ = kNil;
    run_places_.give(id);
}

// ---------------------------------------------------------------- touches

void Retention::touch(const u32* ids, u32 count, const Visit& visit) {
    if (count == 0) return;
    u32 known = 0;    // leading blocks that were touched before
    double gap = -1;  // since that of the last one of them
    auto rows = rows_.cursor();
    const u32 uses = std::min<u32>(rows[ids[0]].uses + 1, 0xffff);
    u32 others = 0;  // not 0 if some blocks have been used more often than others
    u32 hits = 0, shadow_hits = 0;
    for (u32 x = 0; x < count;) {
        const u32 id = rows[ids[x]].run;
        u32 end = x, held = 0;
        for (; end < count; ++end) {
            Row& block = rows[ids[end]];
            if (block.run != id) break;
            held += block.held;
            block.uses += block.uses != 0xffff;
            others |= block.uses ^ uses;
        }
        if (id != kNil) {
            const Run& run = runs_[id];
            if (known == x) {
                known = end;
                const bool continues = 2 * u64(known) > run.path && run.time <= visit.acquired;
                gap = continues ? visit.acquired - run.time : -1;
            }
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
        return LifeTables::class_of(x + 1 == count, rows[ids[x]].uses, gap, visit.output, visit.hint);
    };
    for (u32 end = count; end > 0;) {  // the deepest first: they are the older ones
        const u32 cls = class_at(end - 1);
        u32 start = end - 1;
        const auto continues = [&](u32 x) {  // no block of a flat path does; most of others have been used equally often
            if (rows[ids[x]].parent != ids[x - 1]) return false;
            return (x + 1 < count && rows[ids[x - 1]].uses == rows[ids[x]].uses) || class_at(x - 1) == cls;
        };
        if (others == 0 && start > 0 && continues(start)) start = 0;
        while (start > 0 && continues(start)) --start;
        const u64 order = (serial_ + 1 << kDepthBits) - 1 - std::min<u32>(start, (1u << kDepthBits) - 1);
        const u32 run = make_run(cls, order, end - start, ids[end - 1], count);
        for (u32 x = start; x < end; ++x) {
            Row& block = rows[ids[x]];
            block.run = run;
            block.held = true;
            if (block.leaving) mark_gone(ids[x]);
        }
        end = start;
    }
    settle_edge();
    judge(count, std::min(known, visit.limit), hits, shadow_hits);
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

void Retention::unfile_tail(u32 id) {
    const Row& block = row(id);
    if (block.run != kNil && block.held && runs_[block.run].filed && runs_[block.run].tail == id) unfile(block.run);
}

// Nothing is in the way of its eviction.
bool Retention::is_free(u32 id) const {
    const Row& block = row(id);
    return block.listed && block.held && block.children == 0;
}

void Retention::file_if_free(u32 id) {
    if (!is_free(id)) return;
    const Run& run = runs_[row(id).run];
    if (run.tail == id && !run.filed) file(row(id).run);
}

// A bucket is in the order of last use. A run most often belongs to its end. Otherwise its place is
// looked for from both ends of the bucket, and among the runs before it in its bin.
void Retention::file(u32 id) {
    const Run& run = runs_[id];
    const List& list = buckets_[bucket_of(run)];
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
        if (beside == kNil || runs_[beside].bin != run.bin) continue;
        if (runs_[beside].filed && runs_[beside].cls == run.cls) {
            before = beside;
            break;
        }
        beside = runs_[beside].older;
    }
    place(id, before);
}

// In its bucket, after another run of it.
void Retention::place(u32 id, u32 before) {
    Run& run = runs_[id];
    List& list = buckets_[bucket_of(run)];
    run.filed = true;
    run.before = before;
    run.after = before == kNil ? list.first : runs_[before].after;
    (before == kNil ? list.first : runs_[before].after) = id;
    (run.after == kNil ? list.last : runs_[run.after].before) = id;
    if (before == kNil) compare(run, run.after == kNil);
}

void Retention::unfile(u32 id) {
    Run& run = runs_[id];
    List& list = buckets_[bucket_of(run)];
    (run.before == kNil ? list.first : runs_[run.before].after) = run.after;
    (run.after == kNil ? list.last : runs_[run.after].before) = run.before;
    run.filed = false;
    if (run.before != kNil) return;
    Rank& bin = ranks_[run.bin];
    if (bin.best == run.cls) stale_ |= u64(1) << run.bin;
    if (list.first != kNil) return;
    bin.filled[run.cls / 64] &= ~(u64(1) << run.cls % 64);
    u64 any = 0;
    for (const u64 word : bin.filled) any |= word;
    if (any == 0) occupied_ &= ~(u64(1) << run.bin);
}

// The run is the oldest of its bucket now. only: there is no other one.
void Retention::compare(const Run& run, bool only) {
    Rank& bin = ranks_[run.bin];
    const u64 bit = u64(1) << run.bin;
    if (only) bin.filled[run.cls / 64] |= u64(1) << run.cls % 64;
    if ((occupied_ & bit) == 0) stale_ |= bit;
    occupied_ |= bit;
    if ((stale_ & bit) != 0 || ranked_ != tables_->computed()) return;
    const double density = tables_->density(run.cls, run.bin);
    if (density == bin.density) stale_ |= bit;  // the older of two equal ones is the better one
    if (!(density < bin.density)) return;
    bin.best = run.cls;
    bin.density = density;
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
        if (row(up).held) {
            if (row(up).parent != kNil) __builtin_prefetch(&row(row(up).parent), 1);  // most often the next tail
            return up;
        }
    return kNil;
}

// The shadow evicts a block too.
void Retention::evicted(u32 id, bool chosen) {
    Row& block = row(id);
    ++(chosen ? counts_.chosen : counts_.oldest);
    if (!block.held) return;
    const u32 of = block.run;
    Run& run = runs_[of];
    block.held = false;
    discount(of);
    --run.held;
    if (chosen && !outside_) run.risk = next_risk_;
    recount(of);
    --resident_;
    if (run.tail == id) {
        run.tail = run.held != 0 ? tail_above(id) : kNil;
        // Most often only this block is in the way of the next one, and `unlist` follows.
        const bool last = block.listed && block.parent == run.tail && row(run.tail).children == 1;
        const bool free = run.tail != kNil && (is_free(run.tail) || (last && row(run.tail).listed));
        if (run.filed && !free) unfile(of);
        if (!run.filed && free) file(of);
    }
    settle_edge();
}

}  // namespace kvactors
