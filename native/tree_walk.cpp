// The walk over all blocks of a tree, in steps: from each node up to one that was met before, and
// then down again.
#include "tree_walk.hpp"

namespace kvactors {

TreeWalk::TreeWalk(Tree& tree) : tree_(tree), end_(tree.next_id_), depth_(tree.next_id_), root_(tree.next_id_),
      low_(tree.next_id_), high_(tree.next_id_) {}

namespace {

u32 word(const Key& name, unsigned index) {
    u32 value;
    std::memcpy(&value, name.bytes + 4 * index, 4);
    return value;
}

}  // namespace

bool TreeWalk::met(u32 id) const {
    if (depth_[id] == 0 || tree_.at(id).named == 0) return false;  // a node that was met has a name
    const Key& name = tree_.given_name(id);
    return low_[id] == word(name, 0) && high_[id] == word(name, 1);
}


bool TreeWalk::step(std::size_t count, std::vector<Stretch>& out) {
    bool open = false;  // the last stretch continues
    for (; count != 0; --count) {
        if (up_ != kNil) {
            climb();
        } else if (!chain_.empty()) {
            const u32 above = above_, id = chain_.back();
            const bool is_root = tree_.is_used(above) && (tree_.at(above).bits & kRoot) != 0;
            if (!tree_.is_used(above) || !(is_root || met(above)) || !tree_.is_node(id) || tree_.gone(id) || tree_.at(id).parent != above) {
                chain_.clear();  // removed between two steps, with all nodes below it
                continue;
            }
            if (!open) {
                const u32 root = is_root ? above : root_[above];
                out.push_back({tree_.given_name(root), tree_.given_name(above), is_root ? 0 : depth_[above], {}, {}, {}, {}});
            }
            descend(out.back());
            open = !chain_.empty();
        } else if (next_ == end_) {
            return true;
        } else {
            const u32 id = next_++;
            if (tree_.is_node(id) && !tree_.gone(id) && !met(id)) up_ = id;
        }
    }
    return false;
}

// Goes one node towards the root. A node made after the beginning ends the climb without a result:
// the chain below it is as new as it is.
void TreeWalk::climb() {
    const u32 id = up_;
    if (id >= end_ || !tree_.is_used(id)) {
        chain_.clear();
        up_ = kNil;
    } else if ((tree_.at(id).bits & kRoot) != 0 || met(id)) {
        above_ = id;
        up_ = kNil;
    } else {
        chain_.push_back(id);
        up_ = tree_.at(id).parent;
    }
}

// Goes one node towards the leaf.
void TreeWalk::descend(Stretch& stretch) {
    const u32 id = chain_.back(), above = above_;
    chain_.pop_back();
    const bool is_root = (tree_.at(above).bits & kRoot) != 0;
    depth_[id] = is_root ? 1 : depth_[above] + 1;
    root_[id] = is_root ? above : root_[above];
    const Key& name = tree_.name(id);
    low_[id] = word(name, 0);
    high_[id] = word(name, 1);
    const u32* tokens = tree_.tokens_of(id);
    stretch.tokens.insert(stretch.tokens.end(), tokens, tokens + tree_.block_size());
    if (const u32 extra = tree_.at(id).extra; extra != 0) stretch.extras.emplace_back(depth_[id] - 1, tree_.extras_[extra].bytes);
    stretch.keys.push_back(name);
    stretch.states.push_back(char(tree_.state(tree_.at(id))));
    above_ = id;
}

}  // namespace kvactors
