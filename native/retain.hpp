// The eviction policy RETAIN: which block of a tier to evict first, by learned hit density.
//
// All blocks last touched by the same request are one run, split where their class differs. A run
// is a stretch of one path, and of a flat path one block. Its first blocks may be resident, and the others are ghosts: blocks
// that were evicted, and that are counted until they are requested again or forgotten. Blocks are
// touched from the start of a path and evicted from its end, so both ends move inwards.
//
// Blocks are known by small numbers (`id`) that their owner gives: nodes of the device's tree, or
// slots of the host tier.
#pragma once

#include <array>
#include <limits>
#include <string>

#include "life_tables.hpp"
#include "places.hpp"
#include "slab.hpp"
#include "table.hpp"
#include "zeroed.hpp"

namespace kvactors {

// A position in the order of last use: the blocks before it were in the shadow LRU.
struct Mark {
    u64 order = 0;
    u32 inside = 0;
};

// A request that has ended: what a touch is to record.
struct Visit {
    double acquired;
    Mark mark;         // at that time
    u32 hits;          // leading blocks that were found in the tier
    u32 limit;         // leading blocks that could have been found
    long long output;  // tokens, negative if not known
    u32 hint = 0;      // see `LifeTables::hint_of`
};

// How far the model may leave LRU: see retain_shadow.cpp.
struct Guard {
    double slope;  // blocks that may be displaced for each hit of trust, once there is evidence
};

constexpr Guard kDeviceGuard{17};
// Of device and host together, where a share of the hits as large needs fewer displaced blocks.
constexpr Guard kTotalGuard{2};

struct RetentionCounts {
    u64 runs = 0, ghosts = 0, requests = 0, touched = 0, hits = 0, shadow_hits = 0;
    u64 resident = 0, displaced = 0, limit = 0;
    u64 chosen = 0, oldest = 0;  // victims of the model, and of the LRU order
};

class Retention {
public:
    // touch: bring in the memory of a large tier now, in huge pages, and not as it is used.
    // observes: it adds what it sees to the tables. False if another one of the same blocks does.
    Retention(std::shared_ptr<LifeTables> tables, std::size_t capacity, const Guard& guard, bool touch, bool observes = true);
    Retention(const Retention&) = delete;
    Retention& operator=(const Retention&) = delete;

    // The time, in seconds, which never goes backwards. Moves runs to the bins of their ages.
    void advance(double now);
    double now() const { return now_; }
    Mark mark() const;

    // A block is known from now on, after `parent`. key: identifies it among all blocks and
    // ghosts.
    void add(u32 id, u32 parent, u64 key);
    void recall(u32 id);  // after `add`: it may have been a ghost
    void remove(u32 id);  // it is known as a ghost only
    // What the calls of that name are about to read of a block.
    void expect_list(u32 id) const { __builtin_prefetch(&row(id), 1); }
    void expect_removal(u32 id) const { by_key_.prefetch(hash_of(row(id).key)); }
    u64 key(u32 id) const { return row(id).key; }

    // The block can be evicted once no child of it can: it is resident, and nothing uses it.
    void list(u32 id) {
        Row& block = row(id);
        block.listed = true;
        ++listed_;
        if (block.parent != kNil) {
            Row& above = row(block.parent);
            if (above.children++ == 0 && above.listed) unfile_tail(block.parent);  // it has a child that can be evicted
        }
        if (!block.held) stray(id);
        if (block.children == 0) file_if_free(id);
    }
    void unlist(u32 id) {
        Row& block = row(id);
        block.listed = false;
        --listed_;
        if (block.children == 0) unfile_tail(id);
        if (block.parent != kNil) {
            Row& above = row(block.parent);
            if (--above.children == 0 && above.listed) file_if_free(block.parent);
        }
    }
    // `list` of the last blocks of a path, the last one first. The parent of the first one is in use, as
    // the block was, and only the last one can have no child that is listed.
    void list_run(const u32* ids, u32 count) {
        auto rows = rows_.cursor();
        listed_ += count;
        for (u32 i = count; i-- > 0;) {
            Row& block = rows[ids[i]];
            block.listed = true;
            if (i + 1 < count) ++block.children;
            if (!block.held) stray(ids[i]);
            if (i + 1 == count && block.children == 0) file_if_free(ids[i]);
        }
        const u32 parent = rows[ids[0]].parent;
        if (parent != kNil) ++row(parent).children;
    }
    // `unlist` of them, the first one first: its parent is in use already.
    void unlist_run(const u32* ids, u32 count) {
        auto rows = rows_.cursor();
        listed_ -= count;
        for (u32 i = 0; i < count; ++i) {
            Row& block = rows[ids[i]];
            block.listed = false;
            block.children -= i + 1 < count;
        }
        const u32 last = ids[count - 1], parent = rows[ids[0]].parent;
        if (rows[last].children == 0) unfile_tail(last);
        if (parent != kNil) --row(parent).children;
    }
    bool is_listed(u32 id) const { return row(id).listed; }
    bool is_held(u32 id) const { return row(id).held; }
    u32 children(u32 id) const { return row(id).children; }  // those that are listed

    // The blocks of a path, all of them resident and in use, belong to a request that has ended.
    void touch(const u32* ids, u32 count, const Visit& visit);

    // The next block to evict, kNil if the least recently used one is the choice. `evicted`
    // follows, and then `unlist`.
    u32 victim();
    u32 oldest();  // the least recently used block that can be evicted
    void evicted(u32 id, bool chosen);  // or it was lost
    void next_choice() {
        current_ = oldest_ = kNil;
        outside_ = false;
    }
    // Another tier is about to move `blocks` of these blocks to this one. Where the record allows
    // no more displaced blocks, those that the shadow has evicted or is about to are due: they have
    // to leave that tier first, as this one can only evict what it has.
    void expect(u64 blocks);
    bool is_due(u32 id) const { return due_ != 0 && row(id).run != kNil && runs_[row(id).run].order < due_; }

    // A victim that is still there: it is not listed, until it is touched or has gone.
    void mark_leaving(u32 id);
    void mark_gone(u32 id);
    bool is_leaving(u32 id) const { return row(id).leaving; }
    u64 leaving() const { return leaving_; }
    u64 listed() const { return listed_; }

    RetentionCounts counts() const;
    std::size_t bytes() const;
    void check() const;  // std::runtime_error names the damage

private:
    static constexpr u32 kWords = (LifeTables::kClasses + 63) / 64;

    struct Row {
        u64 key;
        u32 run, parent, children;  // children: listed ones
        u16 uses;
        bool held : 1, listed : 1, leaving : 1;  // held: counts as a resident block of its run
    };

    // One cache line: runs are read in no order that the processor could predict.
    struct alignas(64) Run {
        u64 order;  // of last use: by request, and within one the deeper first
        double time;
        u32 total, held, ghosts;  // blocks, resident ones, and those that only `ghosts_` has
        u32 tail;                 // the deepest resident one
        u32 path;                 // blocks of the request
        u32 first_ghost;
        u32 older, younger;
        u32 before, after;  // in its bucket if `filed`, among the runs of ghosts only if `lost`
        u16 cls;
        u8 bin;
        bool filed, lost;
        u8 risk;  // of a displaced block to cost a hit, in `kCertain` parts
    };
    static_assert(sizeof(Run) == 64, "a run fills a cache line");

    struct Ghost {
        u64 key;
        u32 run, before, after;  // of the same run
        u16 uses;
    };

    struct List {
        u32 first = kNil, last = kNil;
    };

    // The runs of a bin follow one another in the order of last use, from its first run on.
    // time: of that run. To see that no run leaves the bin reads no run.
    struct Bin {
        double time = 0;
        u32 first = kNil;
    };

    // The buckets of a bin.
    struct Rank {
        double density = 0;       // of the best one
        u32 best = kNil;          // the class of the bucket to evict from, unless the bin is in `stale_`
        u64 filled[kWords] = {};  // classes whose bucket has a run
    };

    static constexpr double kNever = std::numeric_limits<double>::infinity();
    static constexpr u32 kCertain = 128;
    static constexpr u32 kBuckets = LifeTables::kClasses * LifeTables::kBins;

    Row& row(u32 id) { return *rows_.row(id); }
    const Row& row(u32 id) const { return *rows_.row(id); }

    // Runs by age.
    u32 make_run(u32 cls, u64 order, u32 blocks, u32 tail, u32 path);
    void enter_bin(u32 run, u32 bin);
    double next_move(u32 bin) const;
    bool leaves(u32 bin) const;
    void leave_bin(u32 run);
    void drop_run(u32 run);
    void detach(u32 run, u32 blocks, u32 held);
    void stray(u32 id);
    u32 tail_above(u32 id) const;
    void settle_lost(u32 run);
    void forget();

    // Runs whose tail can be evicted, by class and bin.
    u32 bucket_of(const Run& run) const { return run.cls * LifeTables::kBins + run.bin; }
    void file(u32 run);
    void place(u32 run, u32 before);
    void unfile(u32 run);
    bool is_free(u32 id) const;
    void file_if_free(u32 id);
    void unfile_tail(u32 id);
    void compare(const Run& run, bool only);
    void choose(u32 bin);
    u32 last_before(const List& list, u64 order) const;
    u32 best_before(u32 bin, u64 order) const;
    u32 victim_outside();
    void check_ranks() const;

    // The shadow: the most recently used blocks, as many as are resident.
    u32 inside(u32 run) const;
    u32 displaced(u32 run) const;
    // Around a change of what a run has or of what the shadow has of it.
    void discount(u32 run) {
        displaced_ -= displaced(run);
        at_risk_ -= displaced(run) * u64(runs_[run].risk);
    }
    void recount(u32 run) {
        displaced_ += displaced(run);
        at_risk_ += displaced(run) * u64(runs_[run].risk);
    }
    u32 edge() const;
    void settle_edge();
    u8 risk_of(const Run& run) const;
    bool may_displace() const { return displaced_ < limit_ && at_risk_ + next_risk_ <= risk_limit_; }
    void begin_trust();
    void judge(u32 touched, u32 known, u32 hits, u32 shadow_hits);

    u32 hash_of(u64 key) const { return u32(key >> 32); }
    u32 find_ghost(u64 key) const;
    void drop_ghost(u32 ghost);

    std::shared_ptr<LifeTables> tables_;
    const bool observes_, at_once_;  // at_once_: its memory is brought in when it is made
    const Guard guard_;
    double now_ = 0;
    double next_move_ = kNever;  // no run leaves its bin before
    u64 serial_ = 0;  // touches
    Slab<Row, 1> rows_;
    std::vector<Run, Mapped<Run>> runs_;
    std::vector<Ghost, Mapped<Ghost>> ghosts_;
    Places run_places_, ghost_places_;
    Table by_key_;
    std::array<Bin, LifeTables::kBins> bins_;
    std::array<Rank, LifeTables::kBins> ranks_;
    std::vector<List> buckets_;
    u64 occupied_ = 0;  // bins that have a run in a bucket
    u64 stale_ = 0;     // bins whose best bucket has to be looked for
    u64 ranked_ = 0;    // the computation of densities that the best buckets follow
    u32 first_ = kNil, last_ = kNil;  // runs: least and most recently used
    List lost_;
    std::size_t lost_runs_ = 0;
    u32 current_ = kNil;  // the run that the present eviction shortens
    u32 oldest_ = kNil;   // and by the order of last use
    u64 leaving_ = 0, listed_ = 0;
    bool holes_ = false;  // a block of a run became resident again in a run of its own

    u64 resident_ = 0, displaced_ = 0, at_risk_ = 0;  // at_risk_: the risks of the displaced blocks
    u32 edge_ = kNil;  // the oldest run of the shadow, of which `edge_inside_` blocks are in it
    u64 edge_inside_ = 0, younger_ = 0;  // younger_: blocks of the runs after it
    u64 due_ = 0;  // the order before which runs are due
    bool outside_ = false;      // the present eviction takes blocks that the shadow lacks
    u8 next_risk_ = kCertain;   // of the run that the present eviction shortens
    double trust_, missed_ = 0;      // see `judge`
    u64 limit_, risk_limit_;     // what `displaced_` and `at_risk_` may reach
    RetentionCounts counts_;
};

}  // namespace kvactors
