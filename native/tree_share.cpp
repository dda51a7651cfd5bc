// Salts, quotas and hints in the tree: see sharing.hpp.
#include <algorithm>
#include <stdexcept>

#include "tree.hpp"

namespace kvactors {
namespace {

constexpr std::size_t kPassed = 16;  // nodes of other salts that cost a step as much as one to forget

}  // namespace

// Blocks from before belong to requests without a salt: the first one with a salt calls this. One
// pass over the nodes, unless the tree is empty.
void Tree::share() {
    if (sharing_ != nullptr || retired_) return;
    shared_ = std::make_unique<Sharing>(std::max<std::size_t>(next_id_, nodes_.rows()));
    sharing_ = shared_.get();
    for (u32 id = 0; id < next_id_; ++id) {
        if (is_used(id) && (at(id).bits & kRoot) != 0) sharing_->add_root(id, 0);
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

bool Tree::is_forgotten(const Path& path) const {
    require(path);
    return path.forgotten || (path.held() != 0 && gone(path.nodes[0]));
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

// Ends all matching of a salt's blocks, in a time that does not depend on their number: no path
// starts from the roots of the salt any more, and no name is found. `forget_step` goes over the
// nodes later.
bool Tree::begin_forget(u64 salt) {
    const u32 owner = retired_ || sharing_ == nullptr ? kNil : sharing_->clear(salt);
    if (owner == kNil) return false;
    for (const u32 id : sharing_->owner(owner).roots) {
        Node& root = at(id);
        if (root.extra != 0) continue;
        roots_.erase(text_of(given_name(id)));
        root.extra = 1;  // a root of this name may be made again
    }
    to_forget_ = next_id_;
    return true;
}

// One step after `begin_forget`: frees the unused blocks of about `count` nodes, the used ones are
// freed when their last use ends. True when nothing is left to do. The youngest node is the first,
// so that a chain that nothing else keeps is removed leaf by leaf.
bool Tree::forget_step(std::size_t count, bool with_names, Forgotten& out) {
    if (retired_) to_forget_ = 0, bare_ = kNil;
    for (std::size_t left = count * kPassed; forgetting();) {
        if (left == 0) return false;
        u32 id = std::exchange(bare_, kNil);
        if (id == kNil) {
            id = --to_forget_;
            --left;
            if (!is_node(id) || !sharing_->awaits_sweep(id)) continue;
            forget_node(id, with_names, out);
        }
        left -= std::min(left, kPassed);
        if (!is_used(id) || is_kept(id)) continue;
        const u32 parent = at(id).parent;
        drop(id);
        if (parent == kNil) continue;
        --at(parent).children;
        bare_ = parent;
    }
    return true;
}

void Tree::forget_node(u32 id, bool with_names, Forgotten& out) {
    Node& node = at(id);
    const Key key = with_names ? name(id) : Key{};
    if (node.named != 0) names_.erase(name_hash(given_name(id)), id);
    node.named = 0;
    sharing_->forget(id);
    ++forgotten_;
    if (with_names) {
        const u32 again = find_named(key);  // computed since
        if (again == kNil || (at(again).bits & kDevice) == 0) out.keys.push_back(key);
    }
    if ((node.bits & kListed) != 0) discard(id, out.freed);
    if (hosted(node)) --counts_.host;
    node.bits &= u8(~(kHost | kHostAge));
    settle_memory(id);
}

// Removes a listed block from the device. `finish_offload` frees one that a copy still reads.
void Tree::discard(u32 id, std::vector<u32>& freed) {
    if (policy_ != nullptr) policy_->evicted(id, false);
    unlink(id);
    if (at(id).pending == 0) freed.push_back(lose_device(id));
}

}  // namespace kvactors
