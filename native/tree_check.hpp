// A check of every invariant of a tree that can be spread over many turns.
#pragma once

#include "tree.hpp"
#include "zeroed.hpp"

namespace kvactors {

// The invariants of a single node hold between any two operations, so they are checked in every
// case. Order, sums and counts of the whole are compared only if no operation came in between
// (`exact`).
class TreeCheck {
public:
    explicit TreeCheck(const Tree& tree);

    // Checks `count` more nodes. True when all were checked. changed: whether the tree was changed
    // since the check began. std::runtime_error names the damage.
    bool step(std::size_t count, bool changed);
    bool exact() const { return exact_; }

private:
    enum class Phase { list, free, nodes, children, over };

    void enter(Phase phase, u32 id);
    void list();
    void free();
    void node();
    void name(u32 id, const Node& node) const;
    void count(u32 id, const Node& node);
    void children();
    void totals() const;
    void shared(u32 id, const Node& node);
    void owners() const;

    const Tree& tree_;
    const u32 end_;
    Phase phase_ = Phase::list;
    u32 id_, before_ = kNil;
    bool exact_ = true;
    Statistics seen_;
    std::size_t roots_ = 0, free_ = 0;
    u64 read_ = 0;
    u32 level_ = 0;
    std::size_t past_roots_ = 0;
    u64 forgotten_ = 0;
    std::unordered_map<u32, Owner> owners_;  // counted
    u64 beside_ = 0, named_ = 0;  // nodes that follow their parent's id, nodes with a name
    // Large ones cost nothing at the start: their memory comes with the first access.
    using Numbers = Zeroed<u32>;
    Numbers children_, device_children_, memory_children_;  // the latter two: those that a policy has in its list
    Numbers place_, extra_uses_;
};

}  // namespace kvactors
