// Salts, quotas and hints in the tree: see sharing.hpp.
#include <algorithm>
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {

// Blocks from before belong to requests without a salt: the first one with a salt calls this. One
// pass over the nodes, unless the tree is empty.
void Tree::share() {
    if (sharing_ != nullptr || retired_) return;
    shared_ = std::make_unique<Sharing>(std::max<std::size_t>(next_id_, nodes_.rows()));
    sharing_ = shared_.get();
    for (u32 id = 0; id < next_id_; ++id) {
        if (!is_node(id)) continue;
        sharing_->add(id, 0);
        if (is_firm(at(id))) sharing_->gained(id);
    }
    for (u32 id = heads_[kPlainLevel]; id != kNil; id = at(id).next) list_shared(id);
}

u32 Tree::list_shared(u32 id) {
    const Node& node = at(id);
    return sharing_->list(id, node.parent, (at(node.parent).bits & kRoot) != 0, node.children != 0);
}

u32 Tree::first_listed() const {
    for (u32 level = 0; level < kLevels; ++level)
        if (heads_[level] != kNil) return heads_[level];
    return kNil;
}

// First blocks whose time is over, then those of a salt above its quota, then those of the lowest
// priority. Among these the policy's choice, if it is one of them.
u32 Tree::shared_victim(const Demand& demand, bool& chosen) {
    const u32 expired = sharing_->expired(demand.now);
    if (expired != kNil) return expired;
    const u32 above = sharing_->above_quota(demand.salt, demand.incoming);
    const u32 first = above == kNil ? first_listed() : sharing_->owner_head(above);
    const u32 preferred = this->preferred();
    const Sharing& sharing = *sharing_;
    chosen = preferred != kNil && sharing.row(preferred).level == sharing.row(first).level &&
             (above == kNil || sharing_->owner_at(preferred) == above);
    const u32 id = chosen ? preferred : first;
    if (above != kNil) sharing_->count_quota(id);
    return id;
}

// The hints of a request that ends, for all its blocks: a use without hints ends those of the last.
void Tree::hint(const Path& path, u32 level, double expiry) {
    require(path);
    const bool plain = level == kPlainLevel && expiry == Sharing::kNever;
    if (retired_ || (plain && (sharing_ == nullptr || !sharing_->hinted))) return;
    share();
    sharing_->hinted = sharing_->hinted || !plain;
    for (u32 i = 0; i < path.committed; ++i) sharing_->hint(path.nodes[i], level, expiry);
}

// Pins the first blocks of a path, all or none: at most `limit` blocks of a tree are pinned. A pin
// is a reference, counted once for each node.
bool Tree::pin_blocks(const Path& path, u32 blocks, u64 limit, std::vector<u32>& nodes) {
    require(path);
    if (blocks > path.committed) throw std::invalid_argument("pin beyond the committed blocks");
    if (retired_ || is_forgotten(path)) return false;
    share();
    u64 fresh = 0;
    for (u32 i = 0; i < blocks; ++i) fresh += !sharing_->pinned(path.nodes[i]);
    if (counts_.pinned + fresh > limit) return false;
    for (u32 i = 0; i < blocks; ++i) {
        const u32 id = path.nodes[i];
        nodes.push_back(id);
        if (!sharing_->pin(id)) continue;
        acquire(id);
        ++counts_.pinned;
    }
    return true;
}

std::vector<u32> Tree::unpin_blocks(const u32* nodes, std::size_t count) {
    for (std::size_t j = 0; j < count; ++j)
        if (sharing_ == nullptr || !is_node(nodes[j]) || !sharing_->pinned(nodes[j]))
            throw std::invalid_argument("unpin of a block that is not pinned");
    std::vector<u32> freed;
    for (std::size_t j = count; j-- > 0;) {
        if (!sharing_->unpin(nodes[j])) continue;
        --counts_.pinned;
        let_go(nodes[j], freed);
    }
    return freed;
}

// Ends all matching of a salt's blocks. The unused ones are free now, and the others when their last
// use ends. One pass over the tree.
Forgotten Tree::forget(u64 salt, bool with_names) {
    Forgotten result;
    const u32 owner = retired_ || sharing_ == nullptr ? kNil : sharing_->find_owner(salt);
    if (owner == kNil) return result;
    std::vector<u32> nodes;
    for (u32 id = 0; id < next_id_; ++id)
        if (is_node(id) && sharing_->owner_at(id) == owner && !gone(id)) nodes.push_back(id);
    for (const u32 id : nodes)
        if (with_names && (at(id).bits & kDevice) != 0) result.keys.push_back(name(id));
    for (u32 id = sharing_->owner_head(owner); id != kNil; id = sharing_->owner_head(owner)) {
        if (policy_ != nullptr) policy_->evicted(id, false);
        unlink(id);
        if (at(id).pending == 0) result.freed.push_back(lose_device(id));  // else `finish_offload` frees it
    }
    for (const u32 id : nodes) {
        Node& node = at(id);
        sharing_->forget(id);
        ++forgotten_;
        if (node.named != 0) names_.erase(name_hash(given_name(id)), id);
        node.named = 0;
        if (hosted(node)) --counts_.host;
        node.bits &= u8(~(kHost | kHostAge));
        settle_memory(id);
        Node& parent = at(node.parent);
        if ((parent.bits & kRoot) == 0 || parent.extra != 0) continue;
        roots_.erase(text_of(given_name(node.parent)));
        parent.extra = 1;  // a root of this name may be made again
    }
    for (const u32 id : nodes)
        if (is_node(id)) reap(id);
    return result;
}

}  // namespace kvactors
