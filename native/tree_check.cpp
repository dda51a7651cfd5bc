// The check of every invariant of the tree, in steps.
#include "tree_check.hpp"

#include <stdexcept>

#include "sha256.hpp"

namespace kvactors {
namespace {

void expect(bool holds, const char* what, u64 id) {
    if (!holds) throw std::runtime_error("block tree is damaged: " + std::string(what) + " (node " + std::to_string(id) + ")");
}

}  // namespace

TreeCheck::TreeCheck(const Tree& tree)
    : tree_(tree),
      end_(tree.next_id_),
      id_(tree.heads_[0]),
      children_(tree.next_id_),
      device_children_(tree.policy_ == nullptr ? 0 : tree.next_id_),
      memory_children_(tree.memory_ == nullptr ? 0 : tree.next_id_),
      place_(tree.next_id_),
      extra_uses_(tree.extras_.size()) {}

bool TreeCheck::step(std::size_t count, bool changed) {
    if (changed && exact_) {
        exact_ = false;
        if (phase_ < Phase::nodes) enter(Phase::nodes, 0);
        if (phase_ > Phase::nodes) phase_ = Phase::over;
    }
    while (count != 0 && phase_ != Phase::over) {
        switch (phase_) {
            case Phase::list: list(); break;
            case Phase::free: free(); break;
            case Phase::nodes: node(); break;
            case Phase::children: children(); break;
            case Phase::over: break;
        }
        --count;
    }
    return phase_ == Phase::over;
}

void TreeCheck::enter(Phase phase, u32 id) {
    phase_ = phase;
    id_ = id;
}

void TreeCheck::list() {
    if (id_ == kNil) {
        expect(tree_.tails_[level_] == before_, "tail of the list", tree_.tails_[level_]);
        before_ = kNil;
        if (++level_ < kLevels) enter(Phase::list, tree_.heads_[level_]);
        else enter(Phase::free, tree_.free_);
        return;
    }
    const Node& node = tree_.at(id_);
    expect(tree_.is_node(id_) && (node.bits & kListed) != 0 && node.prev == before_, "list of evictable nodes", id_);
    place_[id_] = u32(++seen_.evictable);
    expect(seen_.evictable <= tree_.counts_.evictable, "list of evictable nodes is too long", id_);
    before_ = id_;
    id_ = node.next;
}

void TreeCheck::free() {
    if (id_ == kNil || free_ > end_) {
        enter(Phase::nodes, 0);
        return;
    }
    expect(tree_.at(id_).parent == Tree::kFree, "list of free nodes", id_);
    ++free_;
    id_ = tree_.at(id_).next;
}

void TreeCheck::node() {
    if (id_ >= end_) {
        if (exact_) enter(Phase::children, 0);
        else phase_ = Phase::over;
        return;
    }
    const u32 id = id_++;
    if (!tree_.is_used(id)) return;
    const Node& node = tree_.at(id);
    if ((node.bits & kRoot) != 0) {
        ++roots_;
        past_roots_ += node.extra != 0;
        const bool found = tree_.find_root(tree_.given_name(id)) == id;
        expect(node.parent == kNil && node.named != 0 && found == (node.extra == 0), "root", id);
        return;
    }
    const u32 state = node.bits & kStateBits;
    expect(tree_.is_used(node.parent), "parent of a node is gone", id);
    const Node& parent = tree_.at(node.parent);
    expect(state != 0 || node.refs != 0 || node.children != 0 || tree_.retired_ || id == tree_.reaping_ || id == tree_.bare_ || tree_.is_kept(id), "node that nothing keeps", id);
    expect((node.bits & kHost) == 0 || tree_.hosted(node) || id < tree_.stale_ || tree_.retired_, "hint of before a clear", id);
    expect((node.block != kNil) == ((state & (kDevice | kLoading)) != 0), "device block without a reason", id);
    expect((state & (kDevice | kLoading)) != (kDevice | kLoading), "loading although resident", id);
    expect((state & kOffloading) == 0 || ((state & kDevice) != 0 && node.pending != 0), "offload without a block", id);
    expect(node.pending == 0 || (state & kDevice) != 0, "copy from a block the node lost", id);
    expect(node.refs == 0 || (parent.bits & kRoot) != 0 || parent.refs != 0, "unreferenced above a referenced", id);
    expect(parent.children != 0, "number of children", node.parent);
    const bool evictable = Tree::is_firm(node) && node.refs == 0, listed = (node.bits & kListed) != 0;
    const bool gone = tree_.gone(id);
    expect(listed == evictable || ((tree_.retired_ || gone) && !listed), "evictable", id);
    if (tree_.policy_ != nullptr && listed)
        expect(tree_.policy_->is_listed(id) && tree_.policy_->is_held(id), "evictable block that RETAIN does not have", id);
    if (tree_.sharing_ != nullptr) shared(id, node);
    // A node not in the list was removed by a sweep, or was referenced: an operation is reading its
    // block.
    expect(listed || !evictable || node.pending != 0, "block of a retired tree that nothing gives back", id);
    if (Tree::is_firm(node) && !tree_.retired_ && !gone) expect((parent.bits & kRoot) != 0 || Tree::is_firm(parent), "hole above", id);
    expect(tree_.find_child(node.parent, node.extra, tree_.tokens_of(id)) == id, "table of children", id);
    if (node.named != 0 && !gone) name(id, node);
    if (exact_) count(id, node);
}

// A name is checked against that of the node above. Without one there, it was made from a path.
void TreeCheck::name(u32 id, const Node& node) const {
    const Key& found = tree_.given_name(id);
    expect(tree_.find_name(found) == id, "table of names", id);
    if (tree_.at(node.parent).named == 0) return;
    const std::string& extra = tree_.extras_[node.extra].bytes;
    Key name;
    ChainHasher(tree_.block_size_)
        .name(tree_.given_name(node.parent), tree_.tokens_of(id), reinterpret_cast<const u8*>(extra.data()), u32(extra.size()), name);
    expect(name == found, "name", id);
}

void TreeCheck::count(u32 id, const Node& node) {
    const u32 state = node.bits & kStateBits;
    read_ += (node.bits & kListed) != 0 && node.pending != 0;
    expect((place_[id] != 0) == ((node.bits & kListed) != 0), "evictable", id);
    if (place_[id] != 0 && place_[node.parent] != 0) expect(place_[node.parent] > place_[id], "order of the list", id);
    beside_ += id == node.parent + 1;
    named_ += node.named != 0;
    ++children_[node.parent];
    if (tree_.policy_ != nullptr) device_children_[node.parent] += tree_.policy_->is_listed(id);
    if (tree_.memory_ != nullptr) memory_children_[node.parent] += tree_.memory_->is_listed(id);
    ++extra_uses_[node.extra];
    ++seen_.nodes;
    seen_.device += (state & kDevice) != 0;
    seen_.host += tree_.hosted(node);
    seen_.loading += (state & kLoading) != 0;
    seen_.offloading += (state & kOffloading) != 0;
    seen_.referenced += node.refs != 0;
}

// Salt, level and expiry of a node, and its owner's counts.
void TreeCheck::shared(u32 id, const Node& node) {
    const Sharing& sharing = *tree_.sharing_;
    const Sharing::Row& row = sharing.row(id);
    const bool listed = (node.bits & kListed) != 0, below_root = (tree_.at(node.parent).bits & kRoot) != 0;
    expect(below_root || sharing.row(node.parent).owner == row.owner, "salt of a path", id);
    expect(!row.forgotten || (!listed && node.named == 0), "forgotten block", id);
    expect(row.pins == 0 || (node.refs != 0 && (node.bits & kDevice) != 0), "pinned block without a reference", id);
    expect((row.place != kNil) == (listed && row.expires != Sharing::kNever), "block that expires", id);
    expect(row.place == kNil || sharing.heap()[row.place] == id, "place among the blocks that expire", id);
    if (listed && !below_root && (tree_.at(node.parent).bits & kListed) != 0) {
        const Sharing::Row& above = sharing.row(node.parent);
        expect(above.level >= row.level && above.expires >= row.expires && above.order > row.order, "order above a block", id);
    }
    if (!exact_) return;
    Owner& owner = owners_[row.owner];
    ++owner.nodes;
    owner.resident += (node.bits & (kDevice | kOffloading)) == kDevice;
    owner.evictable += listed;
    seen_.pinned += row.pins != 0;
    forgotten_ += row.forgotten;
}

void TreeCheck::owners() const {
    const Sharing& sharing = *tree_.sharing_;
    u64 evictable = 0, above = 0;
    for (const auto& [salt, at] : sharing.by_salt())
        expect(sharing.owner(at).used && sharing.owner(at).salt == salt && !sharing.owner(at).cleared, "record of a salt", at);
    for (u32 at = 0; at < sharing.owners().size(); ++at) {
        const Owner& owner = sharing.owner(at);
        if (!owner.used) continue;
        expect(owner.cleared || sharing.find_owner(owner.salt) == at, "record of a salt", at);
        const auto found = owners_.find(at);
        const Owner counted = found == owners_.end() ? Owner{} : found->second;
        expect(owner.nodes == counted.nodes && owner.resident == counted.resident &&
                   owner.evictable == counted.evictable, "counts of a salt", at);
        expect(owner.above == (owner.resident > owner.quota && owner.evictable != 0), "salt above its quota", at);
        u64 listed = 0;
        for (u32 level = 0; level < kLevels; ++level) {
            u32 before = kNil;
            for (u32 id = owner.head[level]; id != kNil; before = id, id = sharing.row(id).after, ++listed)
                expect(sharing.row(id).before == before && sharing.row(id).level == level, "list of a salt", id);
            expect(owner.tail[level] == before, "end of the list of a salt", at);
        }
        expect(listed == owner.evictable, "length of the list of a salt", at);
        evictable += owner.evictable;
        above += owner.above;
    }
    for (u32 at = sharing.above(); at != kNil; at = sharing.owner(at).after, --above)
        expect(sharing.owner(at).above, "list of salts above their quotas", at);
    expect(above == 0 && evictable == tree_.counts_.evictable && seen_.pinned == tree_.counts_.pinned &&
               forgotten_ == tree_.forgotten_,
           "counts of salts", 0);
}

void TreeCheck::children() {
    if (id_ >= end_) {
        totals();
        phase_ = Phase::over;
        return;
    }
    const u32 id = id_++;
    if (!tree_.is_used(id)) return;
    expect(children_[id] == tree_.at(id).children, "number of children", id);
    const auto counted = [&](const Retention* policy, const Numbers& children) {
        if (policy != nullptr) expect(policy->children(id) == children[id], "children that RETAIN has in its list", id);
    };
    counted(tree_.policy_, device_children_);
    counted(tree_.memory_, memory_children_);
    if ((tree_.at(id).bits & kRoot) != 0 && id != tree_.reaping_ && id != tree_.bare_) expect(children_[id] != 0, "root without children", id);
}

void TreeCheck::totals() const {
    const Statistics& counts = tree_.counts_;
    // A tree being dismantled frees its tables one after the other.
    if (tree_.retired_ && tree_.next_id_ == 0) return;
    for (u32 id = 1; id < extra_uses_.size(); ++id)
        expect(extra_uses_[id] == tree_.extras_[id].uses, "uses of an extra key", id);
    expect(seen_.nodes + roots_ + free_ == tree_.next_id_ && roots_ - past_roots_ == tree_.roots_.size(), "number of nodes", tree_.next_id_);
    expect(seen_.nodes == counts.nodes && seen_.device == counts.device && seen_.host == counts.host &&
               seen_.evictable == counts.evictable && seen_.referenced == counts.referenced &&
               seen_.loading == counts.loading && seen_.offloading == counts.offloading && read_ == tree_.read_ &&
               tree_.children_.used() == seen_.nodes - beside_ && tree_.names_.used() == named_,
           "counts", 0);
    if (tree_.sharing_ != nullptr) owners();
}

void Tree::check() const {
    TreeCheck check(*this);
    while (!check.step(std::size_t(1) << 16, false)) {
    }
    if (policy_ != nullptr) policy_->check();
    if (memory_ != nullptr) memory_->check();
}

}  // namespace kvactors
