// Eviction, reports of the host tier, and retirement.
//
// The head of one list is the right victim for the following reasons. A node is listed when its
// last reference is dropped or when a load of it ends. References are dropped deepest first, and a
// use of a node is a use of all its ancestors, so a listed parent always stands behind its listed
// children. The head therefore has no evictable child, and the order of the list is the order by
// (last use, deeper first). Children that are referenced or loading keep their ancestors
// referenced, except that a load may outlive its request. In that case finish_load does not make it
// resident under a parent that is being evicted. So picking from the head is leaf-first LRU at O(1)
// a block, and the resident nodes that are not being evicted form a tree that hangs from the roots.
// With priorities there is one list for each, and the same holds from list to list: see sharing.hpp.
#include <algorithm>
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {

Evicted Tree::evict(std::size_t count, bool with_names, const Demand& demand) {
    Evicted result;
    if (retired_) return result;
    if (policy_ != nullptr) policy_->next_choice();
    if (memory_ != nullptr) memory_->expect(count);
    while (result.nodes.size() + result.freed.size() < count && has_listed()) {
        bool chosen = false;
        const u32 id = sharing_ != nullptr   ? shared_victim(demand, chosen)
                       : policy_ == nullptr ? heads_[kPlainLevel]
                                            : victim(chosen);
        if (gone(id)) {
            discard(id, result.freed);
            continue;
        }
        Node& node = at(id);
        // 255 operations read this block, and no node above it may be evicted before it.
        if (node.pending == 0xff) break;
        if (policy_ != nullptr) policy_->evicted(id, chosen);
        unlink(id);
        node.bits |= kOffloading;
        ++node.pending;
        ++counts_.offloading;
        if (sharing_ != nullptr) {
            sharing_->lost(id);
            result.salts.push_back(sharing_->salt_of(id));
            result.priorities.push_back(sharing_->priority_of(id));
            result.expiries.push_back(sharing_->expiry_of(id));
        }
        result.nodes.push_back(id);
        result.blocks.push_back(node.block);
        if (with_names) {
            result.keys.push_back(name(id));
            result.parents.push_back(name(node.parent));
        }
        result.states.push_back(char(state(node)));
    }
    return result;
}

// A block is freed by the end of the last operation that reads it. A node may be matched, released
// and evicted again while the first copy is in flight, and its block must not be overwritten under
// either copy, in either order of their ends.
Offloaded Tree::finish_offload(const u32* nodes, std::size_t count, const u8* on_host) {
    for (std::size_t j = 0; j < count; ++j)
        if (!is_node(nodes[j]) || at(nodes[j]).pending == 0)
            throw std::invalid_argument("finish of an offload that is not in flight");
    for (std::size_t j = 0; j < count; ++j) {
        if (on_host[j] == 0 && policy_ != nullptr) policy_->expect_removal(nodes[j]);
        if (memory_ != nullptr) memory_->expect_list(nodes[j]);
    }
    Offloaded result;
    for (std::size_t j = 0; j < count; ++j) {
        const u32 id = nodes[j];
        Node& node = at(id);
        if (!is_node(id) || node.pending == 0) throw std::invalid_argument("a node occurs twice in this offload");
        if (--node.pending == 0 && (node.bits & kListed) != 0) --read_;
        if (on_host[j] != 0 && !gone(id)) set_host(id);
        const bool abandoned = (retired_ || gone(id)) && node.refs == 0;
        if (node.pending != 0 || !((node.bits & kOffloading) != 0 || abandoned)) {
            result.kept.push_back(u32(j));
            continue;
        }
        result.freed.push_back(lose_device(id));
        reap(id);
    }
    return result;
}

// Takes up to `count` blocks from the device at once, without a copy. A block that an offload still
// reads leaves with the end of that offload.
Dropped Tree::drop(std::size_t count, bool with_names, const Demand& demand) {
    Evicted out = evict(count, with_names, demand);
    for (char& state : out.states) state &= kHost;
    Offloaded left = finish_offload(out.nodes.data(), out.nodes.size(), reinterpret_cast<const u8*>(out.states.data()));
    Dropped result{left.freed.size(), std::move(left.freed), {}, {}};
    auto kept = left.kept.begin();
    for (std::size_t j = 0; j < out.keys.size(); ++j) {
        if (kept != left.kept.end() && *kept == j) ++kept;
        else (out.states[j] != 0 ? result.hosted : result.lost).push_back(out.keys[j]);
    }
    result.freed.insert(result.freed.end(), out.freed.begin(), out.freed.end());
    return result;
}

bool Tree::set_host(u32 id) {
    Node& node = at(id);
    if (hosted(node)) return false;
    node.bits = u8((node.bits & ~kHostAge) | kHost | host_age_);
    ++counts_.host;
    settle_memory(id);
    return true;
}

std::size_t Tree::host_blocks_added(const Key* keys, std::size_t count) {
    std::size_t known = 0;
    for (std::size_t i = 0; i < count && !retired_; ++i) {
        const u32 id = find_named(keys[i]);
        if (id == kNil) continue;
        ++known;
        set_host(id);
    }
    return known;
}

// All are found first, so that the waits for memory that follow overlap.
std::size_t Tree::host_blocks_removed(const Key* keys, std::size_t count) {
    if (retired_) return 0;
    scratch_.clear();
    for (std::size_t i = 0; i < count; ++i) {
        const u32 id = find_named(keys[i]);
        scratch_.push_back(id);
        if (id == kNil || (at(id).bits & kRoot) != 0) continue;
        if (policy_ != nullptr) policy_->expect_removal(id);
        if (memory_ != nullptr) memory_->expect_removal(id);
    }
    std::size_t known = 0;
    for (const u32 id : scratch_) {
        if (id == kNil || !is_node(id)) continue;  // removed with one below it
        ++known;
        if (!hosted(at(id))) continue;
        at(id).bits &= u8(~(kHost | kHostAge));
        --counts_.host;
        settle_memory(id);
        reap(id);
    }
    return known;
}

// The time does not depend on the tree's size: earlier bits no longer count, and `sweep_host`
// removes them. It starts at the youngest node, so that a chain that nothing else keeps is removed
// leaf by leaf.
void Tree::clear_host() {
    if (retired_) return;  // nothing matches its nodes, and `sweep_host` does not visit them
    // Bits from two clears ago would have the age of new ones: remove them first.
    sweep_host(~std::size_t(0));
    host_age_ ^= kHostAge;
    counts_.host = 0;
    stale_ = next_id_;
}

// One step of the removals after `clear_host`, over `count` nodes. True when nothing is left to do.
bool Tree::sweep_host(std::size_t count) {
    if (retired_) stale_ = 0, reaping_ = kNil;
    while (stale_ != 0 || reaping_ != kNil) {
        if (count-- == 0) return false;
        u32 id = reaping_;
        if (id == kNil) {
            id = --stale_;
            if (!is_node(id) || (at(id).bits & kHost) == 0 || hosted(at(id))) continue;
            at(id).bits &= u8(~(kHost | kHostAge));
            settle_memory(id);
        }
        reaping_ = kNil;
        if (!is_used(id)) continue;  // another operation has removed it since
        if (is_kept(id)) continue;
        const u32 parent = at(id).parent;
        drop(id);
        if (parent == kNil) continue;
        --at(parent).children;
        reaping_ = parent;
    }
    return true;
}

// Ends all matching. The unused blocks are those of the list. `sweep` returns them, as many a call
// as its caller asks for.
std::size_t Tree::retire() {
    retired_ = true;
    policy_ = memory_ = nullptr;
    return returning();
}

std::vector<u32> Tree::sweep(std::size_t count) {
    if (!retired_) throw std::invalid_argument("sweep of a tree that is in use");
    std::vector<u32> freed;
    while (freed.size() < count && has_listed()) {
        const u32 id = first_listed();
        if (at(id).pending == 0) freed.push_back(lose_device(id));
        else unlink(id);  // `finish_offload` frees its block
    }
    return freed;
}

// Frees a part of the memory. True when all of it is freed. Only for a retired tree that is idle:
// no path and no operation has a node of it.
bool Tree::dismantle() {
    if (!idle()) throw std::invalid_argument("a tree is dismantled although something uses it");
    next_id_ = 0;
    free_ = kNil;
    std::fill_n(heads_, kLevels, kNil);
    std::fill_n(tails_, kLevels, kNil);
    sharing_ = nullptr;
    forgotten_ = to_forget_ = 0;
    bare_ = kNil;
    counts_ = Statistics{};
    roots_.clear();
    if (retention_ != nullptr || host_retention_ != nullptr || shared_ != nullptr) {
        if (retention_ != nullptr) retention_.reset();
        else if (host_retention_ != nullptr) host_retention_.reset();
        else shared_.reset();
        return false;
    }
    if (nodes_.drop() || tokens_.drop() || keys_.drop() || children_.drop() || names_.drop()) return false;
    extra_ids_.clear();
    extras_.resize(1);
    free_extras_.clear();
    return true;
}

}  // namespace kvactors
