// What a tree tracks of its blocks for quotas and hints: the salt that each block belongs to, its
// priority and its time to live. A tree without salts, quotas and hints has none of this.
//
// All blocks of a path have the same salt. A listed block is never in a lower level, and never
// expires earlier, than a listed block below it, so each list begins with a leaf.
#pragma once

#include <limits>
#include <unordered_map>
#include <vector>

#include "slab.hpp"

namespace kvactors {

constexpr u32 kLevels = 5;  // priorities -2 .. 2
constexpr u32 kPlainLevel = 2;
constexpr u64 kUnlimited = ~u64(0);
constexpr std::size_t kCounted = 4096;  // salts without a named quota whose evictions are counted

// The blocks of one salt.
struct Owner {
    u64 salt = 0;  // a digest, 0 for requests without a salt
    u64 resident = 0;   // device blocks that are not leaving
    u64 evictable = 0;  // those in the lists
    u64 quota = kUnlimited;
    u64 evicted = 0;  // because of the quota, as far as it is counted: see count_quota
    u64 nodes = 0;
    u32 head[kLevels], tail[kLevels];
    u32 before = kNil, after = kNil;  // among the owners above their quota with evictable blocks
    bool above = false, used = false, counted = false;
    bool cleared = false;     // none of its blocks is found any more: see Tree::begin_forget
    std::vector<u32> roots;  // nodes that its paths start from
};

class Sharing {
public:
    static constexpr double kNever = std::numeric_limits<double>::infinity();

    explicit Sharing(std::size_t capacity);

    // Nodes. A row exists for every id that the tree has given.
    void add(u32 id, u32 owner);
    void remove(u32 id);
    u32 owner_of(u64 salt);  // makes one
    u32 find_owner(u64 salt) const;
    Owner& owner(u32 at) { return owners_[at]; }
    const Owner& owner(u32 at) const { return owners_[at]; }
    u32 owner_at(u32 id) const { return row(id).owner; }
    u64 salt_of(u32 id) const { return owners_[row(id).owner].salt; }
    int priority_of(u32 id) const { return int(row(id).level) - int(kPlainLevel); }
    double expiry_of(u32 id) const { return row(id).expires; }

    void gained(u32 id) { changed(row(id).owner, 1); }
    void lost(u32 id) { changed(row(id).owner, -1); }
    // Lists a node. children: whether there are nodes below it. Returns its level.
    u32 list(u32 id, u32 parent, bool parent_is_root, bool children);
    u32 unlist(u32 id);
    void hint(u32 id, u32 level, double expiry);

    // Pins, counted by node. Returns whether the node is pinned, or unpinned, by this.
    bool pin(u32 id) { return row(id).pins++ == 0; }
    bool unpin(u32 id) { return --row(id).pins == 0; }
    bool pinned(u32 id) const { return row(id).pins != 0; }

    // The clear of a salt. Its blocks belong to the record that it has had, and are forgotten one by
    // one. The salt gets a new record with its next block.
    u32 clear(u64 salt);  // returns the record, kNil without blocks
    void forget(u32 id) { row(id).forgotten = true; }
    bool is_swept(u32 id) const { return row(id).forgotten; }
    bool awaits_sweep(u32 id) const { return !row(id).forgotten && owners_[row(id).owner].cleared; }
    bool forgotten(u32 id) const { return row(id).forgotten || owners_[row(id).owner].cleared; }
    void add_root(u32 id, u32 owner);
    void remove_root(u32 id);

    // Quotas. kUnlimited for none; `reset` lets the default apply.
    void set_default(u64 quota);
    void set_quota(u64 salt, u64 quota);
    void reset_quota(u64 salt);

    // Listed nodes that are evicted before the policy's choice, kNil for none.
    u32 expired(double now) const;
    u32 above_quota(u64 salt, u64 incoming);  // of the salt itself, else of any that is above its quota
    u32 above() const { return above_first_; }
    // A block was evicted because of a quota. By salt, the first kCounted salts are counted, and those
    // with a named quota: their records stay when their last block leaves.
    void count_quota(u32 id);
    u32 owner_head(u32 at) const;

    bool hinted = false;  // whether a request had a priority or a time to live

    u64 quota_evictions() const { return quota_evictions_; }
    const std::vector<Owner>& owners() const { return owners_; }
    const std::unordered_map<u64, u32>& by_salt() const { return by_salt_; }
    std::size_t bytes() const;

    // For checks.
    struct Row {
        u32 owner;
        u32 before, after;  // in the list of its owner and level
        u32 place;          // in the heap, kNil if not there
        u32 pins;
        u8 own, floor, level;  // level: the one that it is listed in
        bool forgotten;
        double expiry, floor_expiry, expires;  // the last: of the block as it is listed
        u64 order;
    };
    const Row& row(u32 id) const { return *rows_.row(id); }
    const std::vector<u32>& heap() const { return heap_; }

private:
    Row& row(u32 id) { return *rows_.row(id); }
    void changed(u32 at, int by);
    void free_owner(u32 at);
    void settle(u32 at);
    void renew(Owner& owner);
    bool sooner(u32 a, u32 b) const;
    void sift_up(u32 place);
    void sift_down(u32 place);
    void heap_put(u32 place, u32 id);

    Slab<Row> rows_;
    std::vector<Owner> owners_;
    std::vector<u32> free_;
    std::unordered_map<u64, u32> by_salt_;
    std::unordered_map<u64, u64> quotas_;  // of named salts
    u64 default_ = kUnlimited;
    u32 above_first_ = kNil, above_last_ = kNil;
    std::vector<u32> heap_;  // listed nodes that expire, the first to expire first
    u64 order_ = 0, quota_evictions_ = 0;
    std::size_t counted_ = 0;
};

}  // namespace kvactors
