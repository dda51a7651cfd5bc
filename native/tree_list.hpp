// References and the list of evictable nodes: the few lines that a match and a release run for every
// block. Part of tree.hpp.
#pragma once

#include "tree.hpp"

namespace kvactors {

inline void Tree::push(u32 id) {
    Node& node = at(id);
    node.bits |= kListed;
    const u32 level = sharing_ == nullptr ? kPlainLevel : list_shared(id);
    node.prev = tails_[level];
    node.next = kNil;
    (tails_[level] == kNil ? heads_[level] : at(tails_[level]).next) = id;
    tails_[level] = id;
    ++counts_.evictable;
    read_ += node.pending != 0;
    if (policy_ != nullptr) policy_->list(id);
}

inline void Tree::unlink(u32 id) {
    Node& node = at(id);
    const u32 level = sharing_ == nullptr ? kPlainLevel : sharing_->unlist(id);
    (node.prev == kNil ? heads_[level] : at(node.prev).next) = node.next;
    (node.next == kNil ? tails_[level] : at(node.next).prev) = node.prev;
    node.bits &= u8(~kListed);
    --counts_.evictable;
    read_ -= node.pending != 0;
    if (policy_ != nullptr) policy_->unlist(id);
}

// After a change of a block's references or of the tiers that have it.
inline void Tree::settle_memory(u32 id) {
    if (memory_ == nullptr) return;
    const Node& node = at(id);
    const bool on_host = hosted(node);
    if (!on_host) memory_->mark_gone(id);
    const bool free = on_host && node.refs == 0 && (node.bits & (kDevice | kLoading)) == 0 && !memory_->is_leaving(id);
    if (!on_host && (node.bits & kDevice) == 0 && memory_->is_held(id)) memory_->evicted(id, false);
    if (free == memory_->is_listed(id)) return;
    if (free) memory_->list(id);
    else memory_->unlist(id);
}

// A block that is being offloaded is used again: its copy is made, and does not free it.
inline void Tree::stay(u32 id, Node& node) {
    if ((node.bits & kOffloading) == 0) return;
    node.bits &= u8(~kOffloading);
    --counts_.offloading;
    if (sharing_ != nullptr) sharing_->gained(id);
}

inline void Tree::acquire(u32 id) {
    Node& node = at(id);
    if (node.refs++ != 0) return;
    ++counts_.referenced;
    if ((node.bits & kListed) != 0) unlink(id);
    settle_memory(id);
}

// Drops one reference. Dropping the last one lists a resident node as most recently used, or in a
// retired tree frees its block.
inline void Tree::let_go(u32 id, std::vector<u32>& freed) {
    Node& node = at(id);
    if (--node.refs != 0) return;
    --counts_.referenced;
    settle_memory(id);
    if (is_firm(node) && !retired_ && !gone(id)) push(id);
    else let_go_last(id, freed);
}

// References nodes one after another. In the list of a plain tree a path that was released lies in
// reverse, so each run of nodes that are neighbours there is cut out at once, at its end.
class Unlisting {
public:
    explicit Unlisting(Tree& tree) : tree_(tree), plain_(tree.is_plain()) {}
    ~Unlisting() { close(); }
    Unlisting(const Unlisting&) = delete;
    Unlisting& operator=(const Unlisting&) = delete;

    void acquire(u32 id, Node& node) {
        if (!plain_) return tree_.acquire(id);
        if (node.refs++ != 0) return;
        ++referenced_;
        if ((node.bits & kListed) == 0) return;
        node.bits &= u8(~kListed);
        if (tree_.policy_ != nullptr) tree_.policy_->unlist(id);
        ++unlisted_;
        tree_.read_ -= node.pending != 0;
        if (first_ == kNil || node.next != first_) {
            cut();
            after_ = node.next;
        }
        first_ = id;
    }

    // Nodes of a device run, in a plain tree: references, and uses. Writes their blocks.
    template <bool kUsed>
    void acquire_run(const u32* ids, u32 count, u32* blocks) {
        Slab<Node, 1>::Cursor rows = tree_.nodes_.cursor();
        u32 first = first_, referenced = 0, unlisted = 0, read = 0, start = 0;
        Retention* const policy = tree_.policy_;
        const auto unlist_before = [&](u32 end) {  // the policy takes the nodes of a run together
            if (policy != nullptr && start != end) policy->unlist_run(ids + start, end - start);
            start = end + 1;
        };
        for (u32 i = 0; i < count; ++i) {
            const u32 id = ids[i];
            Node& node = rows[id];
            blocks[i] = node.block;
            if (kUsed) {
                if (node.hits != 0xffff) ++node.hits;
                tree_.stay(id, node);
            }
            const bool referenced_before = node.refs++ != 0;
            referenced += !referenced_before;
            if (referenced_before || (node.bits & kListed) == 0) {
                unlist_before(i);
                continue;
            }
            node.bits &= u8(~kListed);
            ++unlisted;
            read += node.pending != 0;
            if (first == kNil || node.next != first) {
                first_ = first;
                cut();
                after_ = node.next;
            }
            first = id;
        }
        unlist_before(count);
        first_ = first;
        referenced_ += referenced;
        unlisted_ += unlisted;
        tree_.read_ -= read;
    }

private:
    void cut() {
        if (first_ == kNil) return;
        const u32 before = tree_.at(first_).prev;
        (before == kNil ? tree_.heads_[kPlainLevel] : tree_.at(before).next) = after_;
        (after_ == kNil ? tree_.tails_[kPlainLevel] : tree_.at(after_).prev) = before;
    }

    void close() {
        cut();
        tree_.counts_.referenced += referenced_;
        tree_.counts_.evictable -= unlisted_;
    }

    Tree& tree_;
    const bool plain_;
    u32 first_ = kNil, after_ = kNil;  // the run: its first node, and the one behind it in the list
    u32 referenced_ = 0, unlisted_ = 0;
};

}  // namespace kvactors
