// A walk over all blocks of a tree that can be spread over many turns: parents before children,
// each block once.
#pragma once

#include "tree_check.hpp"

namespace kvactors {

// Consecutive blocks of one path, the first of them at position `start`.
struct Stretch {
    Key root, parent;
    u32 start;
    Raw<u32> tokens;
    std::vector<Key> keys;
    std::string states;
    // By position in the path, of the blocks that have one.
    std::vector<std::pair<u32, std::string>> extras;
};

// Between the steps the tree may change. A node that exists from the beginning of the walk to its
// end is met. One made since, perhaps under the id of another node, may be met or not.
class TreeWalk {
public:
    explicit TreeWalk(Tree& tree);

    // Visits `count` more nodes, and adds the stretches found to `out`. True when all nodes were
    // visited.
    bool step(std::size_t count, std::vector<Stretch>& out);

private:
    bool met(u32 id) const;
    void climb();
    void descend(Stretch& stretch);

    Tree& tree_;
    const u32 end_;
    u32 next_ = 0;
    u32 up_ = kNil;           // where the climb continues, kNil when there is none
    u32 above_ = kNil;        // the node above the rest of the chain
    std::vector<u32> chain_;  // nodes that were not met before, the deepest first
    Zeroed<u32> depth_, root_;      // by node: 1 + its position, its root. 0 for a node that was not met
    // By node: the first bytes of its name, since its id may have been given to another one.
    Zeroed<u32> low_, high_;
};

}  // namespace kvactors
